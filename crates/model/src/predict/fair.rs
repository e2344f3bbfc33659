//! How flows share what they pass: max-min fair.
//!
//! Knows no machine: capacities, and for each flow the numbers of what it passes.
//!
//! *Invariant:* no capacity is exceeded, and each flow is held back by something that is full.

/// A flow's share, and what is full there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Share {
    pub(super) rate: f64,
    pub(super) full: usize,
}

/// The shares of flows, in their order. A flow that passes nothing has none.
///
/// Progressive filling (Bertsekas and Gallager, "Data Networks", 6.5.2): all rates rise together
/// until something is full; the flows that pass it are done, and the others go on.
pub(super) fn shares(capacities: &[f64], flows: &[Vec<usize>]) -> Vec<Option<Share>> {
    let mut left = capacities.to_vec();
    let mut shares: Vec<Option<Share>> = vec![None; flows.len()];
    while let Some((full, rate)) = next_full(&left, flows, &shares) {
        for (at, flow) in flows.iter().enumerate() {
            if shares[at].is_some() || !flow.contains(&full) {
                continue;
            }
            shares[at] = Some(Share { rate, full });
            for part in flow {
                left[*part] = (left[*part] - rate).max(0.0);
            }
        }
    }
    shares
}

/// What is full first, and at which rate of each flow that is not done; the first of equals.
fn next_full(left: &[f64], flows: &[Vec<usize>], shares: &[Option<Share>]) -> Option<(usize, f64)> {
    let mut users = vec![0_u32; left.len()];
    for (flow, _) in flows.iter().zip(shares).filter(|(_, share)| share.is_none()) {
        flow.iter().for_each(|part| users[*part] += 1);
    }
    let used = left.iter().zip(users).enumerate().filter(|(_, (_, users))| *users > 0);
    let rates = used.map(|(part, (left, users))| (part, left / f64::from(users)));
    rates.min_by(|a, b| a.1.total_cmp(&b.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(capacities: &[f64], flows: &[&[usize]]) -> Vec<f64> {
        let flows: Vec<Vec<usize>> = flows.iter().map(|flow| flow.to_vec()).collect();
        let shares = shares(capacities, &flows);
        shares.into_iter().map(|share| share.map_or(0.0, |share| share.rate)).collect()
    }

    #[test]
    fn what_a_slow_flow_leaves_goes_to_the_others() {
        assert_eq!(rates(&[10.0], &[&[0], &[0]]), [5.0, 5.0]);
        assert_eq!(rates(&[10.0, 2.0], &[&[0], &[0, 1]]), [8.0, 2.0]);
        assert_eq!(rates(&[10.0], &[&[], &[0]]), [0.0, 10.0]);
        assert_eq!(rates(&[10.0], &[&[0, 0]]), [5.0], "it passes twice");
    }
}
