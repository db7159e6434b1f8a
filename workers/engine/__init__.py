"""The loop of one worker group: claims, slots, leases, results, and how all that ends."""
