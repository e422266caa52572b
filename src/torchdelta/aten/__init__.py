"""What torch's ops are: what each one writes, whether it can be run again, and which ones are collectives."""
