"""The processes of a Dask cluster that cuda-cluster supervises.

Runs `distributed`'s own scheduler and workers with the settings it is given, and tells the
supervisor how far they are. Decides nothing: the plan did. No nanny: the supervisor is one.
"""
