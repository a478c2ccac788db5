"""A run on a Ray cluster: ranks that train and engines that sample are actors, the loop runs in the process that started it.

The only place that imports Ray. docs/cluster.md is the page for people who start such runs.
"""
