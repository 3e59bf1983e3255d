"""What is stored: tokens in their slots and nowhere else, whole blocks, pools of any size."""

from __future__ import annotations

import mmap

import torch
from paged_rows import TOLERANCE, PagedRows, relative_error
from runner import Check, Machine, Skip, expect

from hf_paged.backends import block_ops
from hf_paged.backends.base import LayerView
from hf_paged.backends.metadata import AttentionMetadata
from hf_paged.backends.triton import TritonBackend

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return bytes, of which NaN equals NaN."""
    return tensor.contiguous().view(torch.uint8)


def tokens(machine: Machine) -> str:
    """Every byte of the pool is as plain indexing leaves it."""
    cases = [(16, 4, 128), (64, 1, 80), (16, 40, 256), (16, 3, 64)]
    for dtype in DTYPES:
        for block_size, num_heads, head_dim in cases:
            prompt = 2 * block_size + 3 if machine.is_cuda else block_size + 1
            lens = [(0, prompt), (block_size - 1, 1), (5, 1), (-1, 1)]
            rows = PagedRows(
                lens,
                TritonBackend(),
                machine.device,
                dtype,
                block_size=block_size,
                num_kv_heads=num_heads,
                head_dim=head_dim,
                group=1,
            )
            expected = rows.pool.clone()
            slots = rows.metadata.slot_mapping.cpu()
            half = block_size * num_heads * head_dim
            for first, states in ((0, rows.key), (half, rows.value)):
                part = expected[:, first : first + half].unflatten(1, (block_size, -1))
                for token in torch.nonzero(slots >= 0)[:, 0].tolist():
                    slot = int(slots[token])
                    part[slot // block_size, slot % block_size] = states[token].flatten()
            rows.write()
            expect(
                torch.equal(bits(rows.pool), bits(expected)),
                f"{dtype}, blocks of {block_size}, {num_heads} heads of {head_dim}: other bytes",
            )
    return f"{len(DTYPES) * len(cases)} cases, every byte of the pool"


def blocks(machine: Machine) -> str:
    """Copies of whole blocks, given as a step gives them: two rows of one array."""
    for dtype in DTYPES:
        for num_elements in (1, 4096, 9000):
            pool = torch.randn(8, num_elements + 5).to(machine.device, dtype)
            cache, expected = pool[:, 2 : 2 + num_elements], pool.clone()
            source, target = torch.tensor([[0, 5, 5], [1, 2, 7]]).to(machine.device)
            block_ops.copy_blocks(cache, source, target)
            expected[[1, 2, 7], 2 : 2 + num_elements] = expected[[0, 5, 5], 2 : 2 + num_elements]
            expect(torch.equal(pool, expected), f"{dtype}, {num_elements} elements: other values")
    return f"{3 * len(DTYPES)} cases"


def large_pool(machine: Machine) -> str:
    """A pool of more than 2 ** 31 elements: its last blocks, where 32 bits wrap around."""
    block_size, head_dim = 16, 64
    half = block_size * head_dim
    num_blocks = 2**31 // (2 * half) + 64
    shape = (num_blocks + 1, 2 * half)
    num_bytes = 2 * shape[0] * shape[1]
    if machine.is_cuda:
        free, _ = torch.cuda.mem_get_info(machine.device)
        if free < num_bytes + 2**30:
            raise Skip(f"needs {num_bytes / 2**30:.1f} GiB, {free / 2**30:.1f} are free")
        pool = torch.empty(shape, dtype=torch.bfloat16, device=machine.device)
    else:  # address space, of which a few pages are used
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        pool = torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=torch.bfloat16)
        pool = pool.view(shape)
    key_cache, value_cache = (
        part.unflatten(1, (block_size, 1, head_dim)) for part in pool.split(half, dim=1)
    )
    view = LayerView(key_cache, value_cache)
    backend = TritonBackend()
    rows = PagedRows(
        [(0, 21)],
        backend,
        machine.device,
        torch.bfloat16,
        num_kv_heads=1,
        head_dim=head_dim,
        group=4,
    )
    ids = torch.tensor([num_blocks - 1, num_blocks - 5])
    slots = (ids[:, None] * block_size + torch.arange(block_size)).flatten()[:21]
    tables = ids[None].to(machine.device, torch.int32)
    slots = slots.to(machine.device)

    def metadata(num_new: int) -> AttentionMetadata:
        return AttentionMetadata(
            block_size=block_size,
            null_block=num_blocks,
            block_tables=tables,
            seq_lens=torch.tensor([21], dtype=torch.int32, device=machine.device),
            cu_seqlens_q=torch.tensor([0, num_new], dtype=torch.int32, device=machine.device),
            slot_mapping=slots[21 - num_new :],
            seq_lens_list=[21],
            query_lens_list=[num_new],
        )

    for block in (num_blocks - 1, num_blocks - 5, num_blocks - 9):
        pool[block] = torch.nan
    backend.write(rows.key, rows.value, view, metadata(21))
    stored = backend.gather(view, slots)
    expect(torch.equal(stored[0], rows.key), "other keys are stored")
    expect(torch.equal(stored[1], rows.value), "other values are stored")
    backend.copy_blocks(pool, ids[:1].to(machine.device), ids[:1].to(machine.device) - 8)
    expect(torch.equal(pool[num_blocks - 9], pool[num_blocks - 1]), "another block was copied")
    expected = rows.expected()
    for num_new in (1, 2):  # decoding, and a prompt over a past
        new = slice(21 - num_new, 21)
        out = backend.forward(
            rows.query[new],
            rows.key[new],
            rows.value[new],
            view,
            metadata(num_new),
            scale=rows.scale,
        )
        error = relative_error(out, expected[new])
        expect(error <= TOLERANCE[torch.bfloat16], f"{num_new} new: error {error:.1e}")
    return f"{pool.numel() - 2**31:,} elements beyond 2^31"


CHECKS = (
    Check("stores/tokens", tokens),
    Check("stores/blocks", blocks),
    Check("stores/large-pool", large_pool),
)
