"""Sixteen prompts of very different lengths: eight short questions, eight texts to summarise.

The texts are the ends of one story, so each begins differently and none is the prefix of another.
"""

from __future__ import annotations

QUESTIONS = (
    "Hello!",
    "What is the capital of Portugal?",
    "Name three animals that can fly.",
    "Translate into French: the cat sleeps on the warm stove.",
    "Write a haiku about rain on a tin roof.",
    "I have twelve eggs and use five of them for a cake. How many are left, and how did you "
    "work it out?",
    "Explain to a child of seven why the moon seems to change its shape, in three short sentences.",
    "My bicycle makes a clicking noise once for every turn of the pedals, but not when I roll "
    "downhill without pedalling. What are the two most likely causes, and how can I tell them "
    "apart with simple tools?",
)

STORY = (
    "In the late nineteen-fifties a computer had a small fast memory of magnetic cores and a large "
    "slow one on a rotating drum. A program that did not fit in the cores had to be cut into "
    "pieces by hand, and the programmer decided when each piece was to be brought in from the drum "
    "and which other piece it was to replace. This took a large part of the working day, and it "
    "had to be done again whenever the program grew or moved to a machine of another size.",
    "A group in Manchester found a way to give this work to the machine. They cut the memory into "
    "blocks of equal size, which they called pages, and kept a table that said where each page of "
    "a program could be found. A program used addresses as if it owned one large memory. The "
    "hardware looked each address up in the table, and if the page was on the drum, it stopped the "
    "program, fetched the page and went on as if nothing had happened.",
    "The equal size of the pages was the heart of the idea. When pieces of many sizes come and go, "
    "the gaps between them are soon too small for the next piece, although together they would be "
    "large enough. With pages any free place is as good as any other. Nothing has to be moved to "
    "make room, and the only waste is the unused end of the last page of each program.",
    "Which page should leave when all places are taken? The Manchester machine tried to learn how "
    "long each page had lain idle and guessed from this when it would be wanted again. Later "
    "systems mostly threw out the page that had not been used for the longest time, or something "
    "cheap that came close to it. The rule works because programs dwell for a while on a few pages "
    "before they move on to others.",
    "Two programs that run the same code do not need two copies of it. Their tables can name the "
    "same page, and a counter says how many tables do. As long as everybody only reads, the page "
    "can be shared. The first one to write gets a copy of its own, and the others keep the old "
    "one. A program can be duplicated in this way almost for free, because only the pages that "
    "are changed afterwards are ever copied.",
    "Half a century later the same trouble appeared in a new place. A language model keeps the "
    "keys and values of every token that it has read, and this store grows with each word it "
    "writes. Nobody knows beforehand how long an answer will be. Setting aside room for the "
    "longest possible answer wastes most of the memory, and padding all the questions of a batch "
    "to the length of the longest one wastes it as well. The remedy was the old one: cut the store "
    "into blocks of equal size, and keep a table.",
    "The tables brought the old benefits with them. Several answers to one question can share the "
    "blocks of the question. A search that follows many candidates at once copies a block only "
    "when two candidates begin to differ inside it. When an answer is finished, its blocks can be "
    "given to somebody else at once, wherever they lie.",
    "There is a price, as there was in Manchester. Every access goes through the table, and code "
    "that could once run straight through one stretch of memory must now jump from block to block. "
    "Blocks that are too small make the jumps frequent, and blocks that are too large bring back "
    "the waste. In practice a block of sixteen tokens is a good middle, just as pages of a few "
    "thousand bytes have been a good middle for operating systems.",
)

PROMPTS = (
    *QUESTIONS,
    *(
        "Summarise this text in one sentence.\n\n" + "\n\n".join(STORY[-length:])
        for length in range(1, len(STORY) + 1)
    ),
)
