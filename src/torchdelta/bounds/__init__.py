"""What no plan of a class can beat, however it was found: the least time under a budget, and the least peak."""
