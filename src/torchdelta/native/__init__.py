"""Native modules: small C++ sources, prebuilt or built at first use; where they cannot be built, they are not used."""
