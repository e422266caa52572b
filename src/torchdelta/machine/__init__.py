"""What the hardware costs: speeds, sizes and links of a machine, and the time of an op on it.

Nothing in here imports torch but `probe`, which measures the machine it runs on.
"""
