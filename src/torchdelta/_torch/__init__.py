"""The only place that touches private torch APIs, one file for each thing that they are about.

Checked on torch 2.13.0 (CPU); written for 2.11 to 2.14. Every name here has a contract test in
`tests/torch_contract`, so that a torch release that changes one of them fails there, by name, and not somewhere
in the runtime. The rest of the package names no private attribute of torch's objects either: it asks for one through
`storages`, `tensors`, `ops` and their like.
"""
