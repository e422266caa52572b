"""Native modules: small C++ sources that are built at first use; where they cannot be built, they are not used."""
