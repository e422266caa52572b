"""Trains with frameworks that pin older packages than the tests use: axolotl and LLaMA-Factory.

Each framework gets a virtual environment in `build/frameworks/`. Its own command trains a small Llama from a YAML file,
with all weights and with LoRA, each without a budget and in 70 % of the peak, as the framework's how-to says. A
training has passed if the saved weights are equal bit for bit, the peak stayed inside the budget, and memory was
evicted.
"""
