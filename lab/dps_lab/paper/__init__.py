"""`dps reproduce`: the results in the paper, simulated and compared with the published values.

`published` has the values of Tables 1 to 3, and the workloads and fleets of their runs; `further_results` has those of
section 4.4 and of the other engines. `reproduce` simulates all of them, and represents each result as a `value`.
`rank_test` is the paper's test of significance. `cli` prints the results, and `plots` draws them.
"""
