"""The helper process places what it is sent, and says what is wrong with the rest."""

import io

import numpy as np

from torchdelta.pool.helper import serve


def ask(*requests: tuple[list[int], list[int], list[int], int]) -> list[tuple[str, list[int]]]:
    """Send requests; return the head of each answer with its offsets."""
    sent = io.BytesIO()
    for sizes, starts, ends, num_moments in requests:
        sent.write(f"{len(sizes)} {num_moments} 64\n".encode())
        sent.write(np.array([*sizes, *starts, *ends], np.int64).tobytes())
    sent.seek(0)
    answers = io.BytesIO()
    serve(sent, answers)
    answers.seek(0)
    out: list[tuple[str, list[int]]] = []
    for sizes, *_ in requests:
        head = answers.readline().decode().strip()
        length = 8 * len(sizes) if head.startswith("ok") else 0
        out.append((head, np.frombuffer(answers.read(length), np.int64).tolist()))
    assert not answers.read()
    return out


def test_lives_share_addresses_where_they_may():
    """The lower bound is reached, aligned, which those that never meet can only do in one place."""
    ((head, offsets),) = ask(([100, 100, 60], [0, 1, 2], [1, 3, 3], 3))
    assert head == "ok 192 192"
    assert all(offset % 64 == 0 for offset in offsets)
    assert all(0 <= offset <= 192 - size for offset, size in zip(offsets, (100, 100, 60), strict=True))
    assert offsets[1] + 100 <= offsets[2] or offsets[2] + 60 <= offsets[1]


def test_an_end_above_the_last_moment_wraps_around():
    """What dies in the next step keeps its place free of those that are born before."""
    ((head, offsets),) = ask(([64, 64, 64], [0, 1, 2], [1, 2, 4], 3))
    assert head == "ok 128 128"
    assert {offsets[0], offsets[2]} == {0, 64}
    assert offsets[1] in {0, 64}


def test_a_bad_request_is_answered_in_one_line_and_the_next_is_served():
    """A negative size is an error; the helper goes on."""
    answers = ask(([-5], [0], [1], 1), ([64], [0], [1], 1))
    assert answers == [("error '0' has a size of -5 bytes: it must be 0 or more", []), ("ok 64 64", [0])]
