"""Measurements of the kernels beside their peers: ``python -m bench --help``.

Everything runs from the root of a checkout. ``workloads digest report record`` need neither a card
nor PyTorch; the measurements need both.
"""
