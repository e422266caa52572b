"""Makes room, moves buffers, replays ops."""
