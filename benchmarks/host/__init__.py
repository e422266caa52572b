"""Host time of a step whose kernels take next to nothing: what the library costs a thread that only prepares work.

A GPU runs kernels while Python prepares the next ones, so what counts there is the time of the training thread. Here it
is that thread's processor time on models so small that their kernels take almost none, on one thread. Beside plain
stands what any library in Python pays: a dispatch mode and saved-tensor hooks that do nothing. Plain steps run right
after each block, and it is compared with these: machines change their speed between blocks.
"""

from benchmarks.host.command import add_arguments, run

__all__ = ["add_arguments", "run"]
