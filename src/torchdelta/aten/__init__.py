"""Facts about torch's ops: what each one writes, whether it can be replayed, and which ones are collectives."""
