"""The pool against its lower bound and today's allocators, on recorded steps, cut rectangles and public instances.

Every recorded step is a real one: forward, backward and optimizer of a small model on CPU, traced by the library's own
recorder. The large ones are deep models and long unrolled recurrences. Rectangles are cut up by a seeded generator, so
that their perfect packing is known. Public instances (google/minimalloc, `--data DIRECTORY`) are measured where given.
omnimalloc stands in the table where it is installed.
"""

from benchmarks.pool.command import add_arguments, run

__all__ = ["add_arguments", "run"]
