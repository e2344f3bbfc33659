//! The assignment problem: each row gets a column of its own, at the least total cost.
//!
//! Knows nothing of GPUs and NICs. This is the Hungarian method with potentials, one shortest
//! augmenting path a row (Jonker and Volgenant), `O(rows² · columns)`.
//!
//! *Invariant:* the answer assigns each row a different column, and no such assignment costs less.

/// Returns the column of each row.
///
/// `cost(row, column)` is called for all pairs; costs may be as large as `i128::MAX / 4` in sum.
///
/// # Panics
/// If there are more rows than columns, because then no assignment exists.
pub(super) fn assign(
    rows: usize,
    columns: usize,
    cost: impl Fn(usize, usize) -> i128,
) -> Vec<usize> {
    assert!(rows <= columns, "every row needs a column of its own");
    // Rows and columns count from 1 here; column 0 holds the row that is being placed.
    let mut row_of = vec![0usize; columns + 1];
    let mut row_potential = vec![0i128; rows + 1];
    let mut column_potential = vec![0i128; columns + 1];
    for row in 1..=rows {
        row_of[0] = row;
        let mut nearest = vec![i128::MAX; columns + 1];
        let mut came_from = vec![0usize; columns + 1];
        let mut done = vec![false; columns + 1];
        let mut at = 0;
        while row_of[at] != 0 {
            done[at] = true;
            let here = row_of[at];
            let (mut step, mut next) = (i128::MAX, 0);
            for column in (1..=columns).filter(|column| !done[*column]) {
                let reduced =
                    cost(here - 1, column - 1) - row_potential[here] - column_potential[column];
                if reduced < nearest[column] {
                    nearest[column] = reduced;
                    came_from[column] = at;
                }
                if nearest[column] < step {
                    (step, next) = (nearest[column], column);
                }
            }
            for column in 0..=columns {
                if done[column] {
                    row_potential[row_of[column]] += step;
                    column_potential[column] -= step;
                } else if column > 0 {
                    nearest[column] -= step;
                }
            }
            at = next;
        }
        while at != 0 {
            let before = came_from[at];
            row_of[at] = row_of[before];
            at = before;
        }
    }
    let mut column_of = vec![0; rows];
    for (column, row) in row_of[1..].iter().enumerate() {
        if let Some(row) = row.checked_sub(1) {
            column_of[row] = column;
        }
    }
    column_of
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    /// The least cost over every choice of distinct columns.
    fn brute_force(costs: &[Vec<i128>], used: &mut Vec<bool>) -> i128 {
        let Some((row, rest)) = costs.split_first() else { return 0 };
        let mut best = i128::MAX;
        for column in 0..row.len() {
            if !used[column] {
                used[column] = true;
                best = best.min(row[column] + brute_force(rest, used));
                used[column] = false;
            }
        }
        best
    }

    proptest! {
        #[test]
        fn no_other_assignment_costs_less(
            costs in (1usize..=6, 0usize..=2).prop_flat_map(|(rows, more)| {
                let columns = (rows + more).min(6);
                vec(vec((0i128..40).prop_map(|n| n * n), columns), rows)
            })
        ) {
            let columns = costs[0].len();
            let choice = assign(costs.len(), columns, |row, column| costs[row][column]);
            let mut seen = choice.clone();
            seen.sort_unstable();
            seen.dedup();
            prop_assert_eq!(seen.len(), costs.len(), "a column was given twice");
            let total: i128 = choice.iter().zip(&costs).map(|(column, row)| row[*column]).sum();
            prop_assert_eq!(total, brute_force(&costs, &mut vec![false; columns]));
        }
    }
}
