"""Every worker of a run collects the same tests: no name of a test changes from one second to the next."""

import gzip

import pytest


@pytest.mark.parametrize("content", [gzip.compress(b"", mtime=second) for second in (1, 2)])
def test_compressed_bytes_are_not_part_of_a_name(request: pytest.FixtureRequest, content: bytes) -> None:
    """Gzip writes the second into its header: workers that began in different seconds collected other tests."""
    assert request.node.callspec.id in {f"{len(content)}-bytes0", f"{len(content)}-bytes1"}
