"""Claims of the papers and of Holobiont, and what becomes of them when they are run.

`claim` has the records, `commands` what is run, `readings` how a figure is read from an output, `rules` when a figure bears a
claim out, `run` the runs and their JSON files, `pages` the pages of these files. `claims` has the claims, a module for each paper.
Standard library only.
"""
