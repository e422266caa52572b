"""One file for each framework. Nothing is imported here, and the rest of the library imports none of them."""
