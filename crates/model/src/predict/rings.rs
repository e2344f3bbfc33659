//! Rings through GPUs that are joined by NVLinks, as NCCL lays them: each GPU once in each ring,
//! and each NVLink in one ring alone.
//!
//! Knows no bandwidth.
//!
//! *Invariant:* a ring passes no more links between two GPUs than there are.

/// Steps after which no further ring is looked for: of 16 GPUs all are found in far fewer.
const STEPS: u32 = 20_000;

/// As many rings as are found, each as an order of the GPUs; `links[a][b]` joins them.
pub(super) fn rings(links: &[Vec<u32>]) -> Vec<Vec<usize>> {
    let most = links.iter().map(|row| row.iter().sum::<u32>() / 2).min().unwrap_or(0);
    let mut best = Vec::new();
    // Which ring is taken first decides how many are left.
    for turn in 0..links.len() {
        let mut left = links.to_vec();
        let mut found = Vec::new();
        while let Some(ring) = Search::new(&left, turn).ring() {
            let next = ring.iter().cycle().skip(1);
            for (a, b) in ring.iter().zip(next) {
                left[*a][*b] -= 1;
                left[*b][*a] -= 1;
            }
            found.push(ring);
        }
        if found.len() > best.len() {
            best = found;
        }
        if u32::try_from(best.len()).is_ok_and(|found| found >= most) {
            break;
        }
    }
    best
}

/// A search for one ring.
struct Search<'a> {
    left: &'a [Vec<u32>],
    turn: usize,
    steps: u32,
}

impl<'a> Search<'a> {
    fn new(left: &'a [Vec<u32>], turn: usize) -> Self {
        Self { left, turn, steps: STEPS }
    }

    fn ring(mut self) -> Option<Vec<usize>> {
        // Two GPUs have one way there and back, which is no ring.
        let mut path = vec![0];
        (self.left.len() > 2 && self.extend(&mut path)).then_some(path)
    }

    fn extend(&mut self, path: &mut Vec<usize>) -> bool {
        let (Some(&last), count) = (path.last(), self.left.len()) else { return false };
        if path.len() == count {
            return self.left[last][0] > 0;
        }
        // Where most links are left, most rings are left.
        let mut next: Vec<usize> = (0..count).map(|at| (at + self.turn) % count).collect();
        next.retain(|at| self.left[last][*at] > 0 && !path.contains(at));
        next.sort_by_key(|at| std::cmp::Reverse(self.left[last][*at]));
        for at in next {
            let Some(steps) = self.steps.checked_sub(1) else { return false };
            self.steps = steps;
            path.push(at);
            if self.extend(path) {
                return true;
            }
            path.pop();
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The hybrid cube mesh of a DGX-1 with V100: 6 links each.
    const CUBE_MESH: [[u32; 8]; 8] = [
        [0, 1, 1, 2, 2, 0, 0, 0],
        [1, 0, 2, 1, 0, 2, 0, 0],
        [1, 2, 0, 2, 0, 0, 1, 0],
        [2, 1, 2, 0, 0, 0, 0, 1],
        [2, 0, 0, 0, 0, 1, 1, 2],
        [0, 2, 0, 0, 1, 0, 2, 1],
        [0, 0, 1, 0, 1, 2, 0, 2],
        [0, 0, 0, 1, 2, 1, 2, 0],
    ];

    #[test]
    fn a_cube_mesh_has_three_rings() {
        let links: Vec<Vec<u32>> = CUBE_MESH.iter().map(|row| row.to_vec()).collect();
        assert_eq!(rings(&links).len(), 3);
    }

    #[test]
    fn pairs_have_no_ring_through_all() {
        let links = vec![vec![0, 4, 0, 0], vec![4, 0, 0, 0], vec![0, 0, 0, 4], vec![0, 0, 4, 0]];
        assert_eq!(rings(&links), Vec::<Vec<usize>>::new());
        assert_eq!(rings(&[vec![0, 4], vec![4, 0]]), Vec::<Vec<usize>>::new());
        assert_eq!(rings(&[]), Vec::<Vec<usize>>::new());
    }

    proptest! {
        #[test]
        fn no_link_is_in_two_rings(
            half in proptest::collection::vec(proptest::collection::vec(0..4_u32, 9), 9),
            count in 0..9_usize,
        ) {
            let link = |a: usize, b: usize| if a == b { 0 } else { half[a.min(b)][a.max(b)] };
            let links: Vec<Vec<u32>> =
                (0..count).map(|a| (0..count).map(|b| link(a, b)).collect()).collect();
            let mut used = vec![vec![0; count]; count];
            for ring in rings(&links) {
                let mut sorted = ring.clone();
                sorted.sort_unstable();
                prop_assert_eq!(sorted, (0..count).collect::<Vec<_>>());
                for (a, b) in ring.iter().zip(ring.iter().cycle().skip(1)) {
                    used[*a][*b] += 1;
                    used[*b][*a] += 1;
                    prop_assert!(used[*a][*b] <= links[*a][*b]);
                }
            }
        }
    }
}
