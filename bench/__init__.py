"""Headrace's figures, beside their peers in the same run.

Ratios count, since machines are shared and noisy.

    python -m bench             all of them, a table at the end
    python -m bench flow zero   some
"""
