"""Every model class of transformers and every module of torch.nn: plain bits, bit for bit, or listed by name.

Each class is built tiny, trained for one step plainly, twice, and then inside budgets that recompute everything, swap
everything, mix the two with keeping, and recompute everything under bf16 autocast. Loss, gradients, parameters, buffers
and the state of every generator are compared as bytes; tensor bytes, threads and saved tensors that stay are leaks.
In a fifth mode the step is repeated in one scope, and a drawn program of it is followed (`tests/following.py`).
A sixth mode is like the fifth, but parameters and gradients leave, too, at drawn moments.
In a seventh the step is not recorded at first, and recorded from a drawn moment on (`tests/paused.py`); not without the
modules in C++, which pauses need.
What plain eager does not do twice alike, and what cannot be built, is listed apart, with the reason.

`sweep.jsonl` holds one line a class. A sweep that was stopped goes on where it stopped, as long as neither the sources
nor the limits have changed.
"""
