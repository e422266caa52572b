"""What the runtime knows: buffers, storages, the tape of ops, and the ledger that counts them."""
