"""Native pieces: small C++ sources that are built at their first use, and a plain way on where they cannot be."""
