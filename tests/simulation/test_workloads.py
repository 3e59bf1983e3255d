"""Requests that are drawn or read, and what is said about those that cannot be."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from hf_paged.errors import ConfigurationError
from hf_paged.simulation.length_distribution import LengthDistribution
from hf_paged.simulation.request import Request
from hf_paged.simulation.workload import check_fits, draw_requests
from hf_paged.simulation.workload_file import read_requests

GOOD = "arrival,prompt,output\n" + "0,10,5\n" * 5


def test_distributions_stay_in_their_range() -> None:
    generator = random.Random(0)
    for text in ("fixed:50", "uniform:8:90", "normal:50:400:8:90", "lognormal:50:3:8:90"):
        distribution = LengthDistribution.parse(text, "--prompts")
        lengths = [distribution.sample(generator) for _ in range(300)]
        assert all(8 <= length <= 90 for length in lengths), text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("zipf:2", "'zipf:2' is no distribution; expected one of fixed:LENGTH"),
        ("normal:220", "does not read as normal:MEAN:DEVIATION"),
        ("normal:220:x", "in numbers"),
        ("normal:220:nan", "in numbers"),
        ("normal:220:-1", "has no such lengths"),
        ("uniform:9:8", "has no such lengths"),
        ("uniform:0:8", "a length is at least 1 token"),
        ("normal:220:160:9:8", "expected 1 <= SHORTEST <= LONGEST, got 9 and 8"),
    ],
)
def test_a_distribution_that_is_none(text: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match="--prompts: ") as caught:
        LengthDistribution.parse(text, "--prompts")
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_equal_seeds_draw_equal_requests() -> None:
    """And arrivals never go back."""
    fixed = LengthDistribution.parse("uniform:1:9", "")
    first, again, other = (
        draw_requests(20, fixed, fixed, rate=0.5, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other
    arrivals = [request.arrival for request in first]
    assert arrivals == sorted(arrivals)


def test_csv_and_jsonl_say_the_same(tmp_path: Path) -> None:
    """Ordered by arrival, optional columns filled in; a name of a prefix becomes a number."""
    table = tmp_path / "trace.csv"
    table.write_text("arrival,prompt,output,prefix,prefix_tokens\n3,10,5,chat,8\n\n1.5, 20 ,1,,\n")
    lines = tmp_path / "trace.jsonl"
    lines.write_text(
        '{"arrival": 3, "prompt": 10, "output": 5, "prefix": "chat", "prefix_tokens": 8}\n'
        "\n"
        '{"arrival": 1.5, "prompt": 20, "output": 1}\n'
    )
    early, late = read_requests(table)
    assert early == Request(0, 1.5, 20, 1, origin=f"line 4 of {table}")
    assert late == Request(1, 3, 10, 5, 1, 0, 8, f"line 2 of {table}")
    assert [
        (r.arrival, r.num_prompt_tokens, r.num_output_tokens, r.prefix)
        for r in read_requests(lines)
    ] == [(1.5, 20, 1, None), (3, 10, 5, 0)]


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("t.csv", GOOD + "0,ten,5\n", "line 7 of {path}: prompt must be a number, got 'ten'"),
        ("t.csv", GOOD + "0,,5\n", "line 7 of {path}: prompt must be a number, got nothing"),
        ("t.csv", GOOD + "0,10\n", "line 7 of {path}: 2 values for 3 columns"),
        ("t.csv", GOOD + "0,10,0\n", "line 7 of {path}: output must be a whole number of at least"),
        ("t.csv", GOOD + "0,inf,1\n", "line 7 of {path}: prompt must be a whole number"),
        ("t.csv", GOOD + "0,1.5,1\n", "line 7 of {path}: prompt must be a whole number"),
        ("t.csv", GOOD + "-1,10,5\n", "line 7 of {path}: arrival must be a step, 0 or later"),
        ("t.csv", GOOD + "nan,10,5\n", "line 7 of {path}: arrival must be a step, 0 or later"),
        ("t.csv", GOOD + '0,"10,5\n', "line 7 of {path}: no CSV"),
        ("t.csv", "arrival,prompt,out\n", "line 1 of {path}: unknown column 'out'; known are"),
        ("t.csv", "arrival,prompt\n", "line 1 of {path}: column 'output' is missing"),
        ("t.csv", "arrival,prompt,output,output\n", "a column is named twice"),
        ("t.csv", "arrival,prompt,output\n", "{path}: holds no requests"),
        ("t.csv", "", "{path}: holds no requests"),
        ("t.txt", GOOD, "{path}: expected a file that ends in .csv, .jsonl or .ndjson"),
        ("t.jsonl", '{"arrival": 0,\n', "line 1 of {path}: no JSON"),
        ("t.jsonl", "[1, 2]\n", "line 1 of {path}: expected an object, got '[1, 2]'"),
        (
            "t.jsonl",
            '{"arrival": 0, "prompt": true, "output": 1}\n',
            "line 1 of {path}: prompt must be a number, got True",
        ),
        (
            "t.jsonl",
            '{"arrival": 0, "prompt": 4, "output": 1, "prefix": "a", "prefix_tokens": 5}\n',
            "line 1 of {path}: prefix_tokens 5 is more than prompt 4",
        ),
        (
            "t.jsonl",
            '{"arrival": 0, "prompt": 4, "output": 1, "prefix_tokens": 2}\n',
            "line 1 of {path}: prefix and prefix_tokens belong together",
        ),
    ],
)
def test_a_malformed_file_is_named_with_its_line(
    tmp_path: Path, name: str, text: str, complaint: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        read_requests(path)
    assert complaint.format(path=path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        read_requests(tmp_path / "none.csv")
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="it is not UTF-8 text"):
        read_requests(binary)


def test_a_request_longer_than_the_budget_is_named() -> None:
    """The last token is never stored, so 30 + 11 tokens fit into 40 slots, 30 + 12 do not."""
    check_fits([Request(0, 0, 30, 11)], 40, None)
    with pytest.raises(ConfigurationError, match=r"line 7: prompt 30 \+ output 12 = 42 tokens can"):
        check_fits([Request(0, 0, 30, 12, origin="line 7")], 40, None)
    with pytest.raises(ConfigurationError, match=r"line 7: .* but --max-len is 40"):
        check_fits([Request(0, 0, 30, 11, origin="line 7")], 100, 40)
