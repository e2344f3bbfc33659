"""Processes that are forked from one that has imported already, instead of executed.

A forked process is bound, reported and adopted by the guardian like an executed one. What it then
does is its engine's.
"""
