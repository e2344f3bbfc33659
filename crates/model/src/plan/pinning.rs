//! Which usable NICs each GPU's traffic gets.
//!
//! Does not judge whether a NIC can be used; `nics` does.
//!
//! *Invariant:* an assigned NIC is at its GPU's nearest level, not counting NICs so slow that
//! farther ones give every GPU more; no NIC serves two GPUs while an equally near NIC of either is
//! idle.

use std::collections::BTreeMap;

use super::assign::assign;
use super::form::Rejected;
use super::nics::{Cause, Given, Nics, Usable, level, link_word};
use super::rates;
use crate::ids::GpuIndex;
use crate::predict;
use crate::topology::{Gpu, LinkKind, Nic, Note};

/// By which factor the total bandwidth must grow before nearer NICs are given up for faster ones.
/// Large, because the rates are rough.
const WORTH_LEAVING: f64 = 1.25;

/// Each GPU's NIC: its position in `usable`, and the GPU's turn among that NIC's GPUs.
type Turns = Vec<(usize, usize)>;

impl Nics<'_> {
    /// One NIC for each GPU: the nearest. Ties are shared evenly, faster NICs first, then by name.
    pub(super) fn pin(&self, gpus: &[&Gpu]) -> BTreeMap<GpuIndex, Given> {
        let turns = self.assignment(gpus);
        let mut given = BTreeMap::new();
        for (row, gpu) in gpus.iter().enumerate() {
            let (at, turn) = turns[row];
            let with: Vec<GpuIndex> = gpus
                .iter()
                .zip(&turns)
                .filter(|(other, (nic, _))| *nic == at && other.index != gpu.index)
                .map(|(other, _)| other.index)
                .collect();
            let port = self.usable[at].port(turn);
            let choice = Given {
                reason: self.reason(gpu, at, &with),
                rejected: self.rejected(gpu, &[at], gpus, &turns),
                ports: vec![port],
            };
            given.insert(gpu.index, choice);
        }
        given
    }

    /// All NICs of the nearest level, shared out so that none is idle.
    pub(super) fn stripe(&self, gpus: &[&Gpu]) -> BTreeMap<GpuIndex, Given> {
        let turns = self.assignment(gpus);
        let mut of: Vec<Vec<usize>> = turns.iter().map(|(at, _)| vec![*at]).collect();
        let idle = self.in_order_of_name().into_iter();
        for at in idle.filter(|at| turns.iter().all(|(used, _)| used != at)) {
            // An idle NIC goes to the GPU with the fewest NICs among those it is nearest to.
            let near = in_order_of_place(gpus).into_iter().filter(|row| {
                let best = self.nearest_level(gpus[*row]);
                level(self.link(gpus[*row], self.usable[at].at)) == best
            });
            if let Some(row) = near.min_by_key(|row| of[*row].len()) {
                of[row].push(at);
            }
        }
        let mut given = BTreeMap::new();
        for (row, gpu) in gpus.iter().enumerate() {
            let kind = self.way(gpu, self.usable[of[row][0]].at);
            let count = of[row].len();
            let own = if count == 1 { "the one NIC" } else { "the NICs" };
            let reason = format!("{count} × {kind}: {own} of the nearest level that it gets");
            let ports = of[row].iter().map(|at| {
                let turn = if *at == turns[row].0 { turns[row].1 } else { 0 };
                self.usable[*at].port(turn)
            });
            let choice = Given {
                ports: ports.collect(),
                reason,
                rejected: self.rejected(gpu, &of[row], gpus, &turns),
            };
            given.insert(gpu.index, choice);
        }
        given
    }

    /// Weighs rates against distances: drops much slower NICs if every GPU gains, and notes choices
    /// that an expert would question.
    pub(super) fn weigh(&mut self, gpus: &[&Gpu]) {
        if gpus.is_empty() || self.usable.is_empty() {
            return;
        }
        self.leave_slow_ones(gpus);
        let turns = self.assignment(gpus);
        self.note_faster_ones(gpus, &turns);
        self.note_nearer_ones_that_are_down(gpus, &turns);
    }

    fn leave_slow_ones(&mut self, gpus: &[&Gpu]) {
        let rates: Vec<f64> = self.usable.iter().map(Usable::best_rate).collect();
        let best = rates.iter().copied().fold(0.0, f64::max);
        if rates.iter().any(|rate| *rate <= 0.0) {
            return;
        }
        let slow: Vec<usize> = (0..rates.len()).filter(|at| rates[*at] < best / 2.0).collect();
        let near = self.assignment(gpus);
        if !near.iter().any(|(at, _)| slow.contains(at)) {
            return;
        }
        let before = std::mem::replace(&mut self.slow, slow);
        let far = self.assignment(gpus);
        // Assume that a GPU has a nearer NIC to itself, and shares a farther one with all others.
        let now: Vec<f64> = self.carried(gpus, &near, false);
        let then: Vec<f64> = self.carried(gpus, &far, true);
        let none_loses = now.iter().zip(&then).all(|(now, then)| then >= now);
        if !none_loses || then.iter().sum::<f64>() < WORTH_LEAVING * now.iter().sum::<f64>() {
            self.slow = before;
        }
    }

    /// Bandwidth of each GPU to the network over its NIC, in 10⁹ bytes per second.
    fn carried(&self, gpus: &[&Gpu], turns: &Turns, shared: bool) -> Vec<f64> {
        let one = |(gpu, (at, _)): (&&Gpu, &(usize, usize))| {
            let served = turns.iter().filter(|(other, _)| other == at).count();
            self.reach(gpu, *at, if shared { served } else { 1 })
        };
        gpus.iter().zip(turns).map(one).collect()
    }

    /// Bandwidth of a GPU to the network over a NIC that serves this many GPUs, in 10⁹ bytes per
    /// second.
    fn reach(&self, gpu: &Gpu, at: usize, served: usize) -> f64 {
        let Usable { nic, at: place, .. } = &self.usable[at];
        let kind = self.link(gpu, *place).unwrap_or(LinkKind::Sys);
        let rate = predict::port(self.usable[at].best_rate()) / served as f64;
        rate.min(rates::to_nic(gpu, nic, kind))
    }

    /// Notes that a nearer NIC was given up for a faster one, or kept although another is faster.
    fn note_faster_ones(&mut self, gpus: &[&Gpu], turns: &Turns) {
        let mut said: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (gpu, (at, _)) in gpus.iter().zip(turns) {
            let chosen = level(self.link(gpu, self.usable[*at].at));
            let nearer = self
                .slow
                .iter()
                .copied()
                .filter(|slow| level(self.link(gpu, self.usable[*slow].at)) < chosen);
            let nearer = nearer.min_by_key(|slow| level(self.link(gpu, self.usable[*slow].at)));
            let text = match nearer {
                Some(slow) => Some(format!(
                    "{} is nearer, but {} is so much faster that it is used: about {:.0} instead of \
                     {:.0} GB/s",
                    self.described(gpu, slow),
                    self.described(gpu, *at),
                    self.reach(gpu, *at, 1),
                    self.reach(gpu, slow, 1),
                )),
                None => self.faster(gpu, *at).map(|fast| {
                    format!(
                        "{} is used, though {} is faster: about {:.0} against {:.0} GB/s if it had \
                         that alone",
                        self.described(gpu, *at),
                        self.described(gpu, fast),
                        self.reach(gpu, *at, 1),
                        self.reach(gpu, fast, 1),
                    )
                }),
            };
            if let Some(text) = text {
                said.entry(text).or_default().push(format!("GPU {}", gpu.index));
            }
        }
        let notes = said.into_iter().map(|(text, gpus)| Note::new(gpus.join(", "), text));
        self.choices.extend(notes);
    }

    /// A farther NIC that would give a GPU clearly more, if it had it to itself.
    fn faster(&self, gpu: &Gpu, at: usize) -> Option<usize> {
        let rate = self.usable[at].best_rate();
        let better = |other: &usize| {
            let far = level(self.link(gpu, self.usable[*other].at))
                > level(self.link(gpu, self.usable[at].at));
            far && self.reach(gpu, *other, 1) >= WORTH_LEAVING * self.reach(gpu, at, 1)
        };
        let others = self.in_order_of_name().into_iter().filter(better);
        others
            .max_by(|a, b| self.reach(gpu, *a, 1).total_cmp(&self.reach(gpu, *b, 1)))
            .filter(|_| rate > 0.0)
    }

    /// `mlx5_0:1 (PIX, 25 Gbit/s)`
    fn described(&self, gpu: &Gpu, at: usize) -> String {
        let nic = &self.usable[at];
        let link = link_word(self.link(gpu, nic.at));
        format!("{} ({link}, {} Gbit/s)", nic.port(0), nic.best_rate())
    }

    /// Notes inactive ports that are nearer than the ones used instead.
    fn note_nearer_ones_that_are_down(&mut self, gpus: &[&Gpu], turns: &Turns) {
        let down = self.refused.iter().filter(|refused| refused.cause == Cause::State);
        let notes: Vec<Note> = down
            .filter_map(|refused| {
                let concerned: Vec<String> = gpus
                    .iter()
                    .zip(turns)
                    .filter(|(gpu, (at, _))| {
                        let chosen = level(self.link(gpu, self.usable[*at].at));
                        level(self.link(gpu, refused.at)) < chosen
                    })
                    .map(|(gpu, _)| format!("GPU {}", gpu.index))
                    .collect();
                let verb = if concerned.len() == 1 { "uses" } else { "use" };
                let text =
                    format!("{}: {} {verb} a farther NIC", refused.why, concerned.join(", "));
                (!concerned.is_empty()).then(|| Note::new(&refused.what, text))
            })
            .collect();
        self.choices.extend(notes);
    }

    fn nearest_level(&self, gpu: &Gpu) -> u32 {
        let candidates = self.in_order_of_name().into_iter();
        candidates.map(|at| level(self.link(gpu, self.usable[at].at))).min().unwrap_or(u32::MAX)
    }

    /// For each GPU the position of its NIC in `usable`, and its turn among that NIC's GPUs.
    ///
    /// Takes GPUs in the order of their PCI addresses and NICs in the order of their names, so that
    /// the answer does not depend on their numbering.
    fn assignment(&self, gpus: &[&Gpu]) -> Turns {
        let (rows, columns) = (in_order_of_place(gpus), self.in_order_of_name());
        let slower = slower_ranks(&self.usable);
        let levels: Vec<Vec<u32>> = rows
            .iter()
            .map(|row| {
                let level_of = |at: &usize| level(self.link(gpus[*row], self.usable[*at].at));
                columns.iter().map(level_of).collect()
            })
            .collect();
        // The goals by weight, least first; each outweighs all lesser goals together.
        let (n, m) = (rows.len() as i128 + 1, columns.len() as i128 + 1);
        let low_name = n * n * m;
        let fast = n * m * low_name + n * n * m;
        let share = n * m * fast * 2;
        let near = n * n * share * 2;
        let slots = assign_slots(rows.len(), columns.len(), |row, column, turn| {
            i128::from(levels[row][column]) * near
                + turn as i128 * share
                + slower[columns[column]] as i128 * fast
                + column as i128 * low_name
                // The sum of products is largest if both sequences rise: GPU order and NIC order
                // then agree, which is how rails are cabled.
                + (n * m - (row * column) as i128)
        });
        let mut turns = vec![(0, 0); gpus.len()];
        for (row, (column, turn)) in slots.into_iter().enumerate() {
            turns[rows[row]] = (columns[column], turn);
        }
        turns
    }

    /// Positions in `usable` of the NICs that take part.
    fn in_order_of_name(&self) -> Vec<usize> {
        let mut order: Vec<usize> =
            (0..self.usable.len()).filter(|at| !self.slow.contains(at)).collect();
        order.sort_by_cached_key(|at| nic_key(self.usable[*at].nic));
        order
    }

    fn reason(&self, gpu: &Gpu, at: usize, with: &[GpuIndex]) -> String {
        let link = self.link(gpu, self.usable[at].at);
        let way = self.way(gpu, self.usable[at].at);
        let best = level(link);
        let all = self.in_order_of_name();
        let tied =
            all.iter().filter(|at| level(self.link(gpu, self.usable[**at].at)) == best).count();
        let much_faster = if self.slow.is_empty() { "" } else { "of those that are fast enough, " };
        let mut reason = match tied {
            1 if self.usable.len() == 1 => format!("{way}, the only usable NIC"),
            1 => format!("{way}, {much_faster}the nearest of {} usable NICs", self.usable.len()),
            _ => format!("{way}; {tied} NICs are equally near and shared out evenly"),
        };
        if !with.is_empty() {
            let others: Vec<String> = with.iter().map(|gpu| format!("GPU {gpu}")).collect();
            reason.push_str(&format!("; also serves {}", others.join(", ")));
        }
        if matches!(link, Some(LinkKind::Sys)) {
            let nearer =
                self.slow.iter().any(|at| level(self.link(gpu, self.usable[*at].at)) < best);
            reason.push_str(if nearer {
                "; far from this GPU, but the nearer ones are much slower"
            } else {
                "; far from this GPU, but there is no nearer one"
            });
        }
        reason
    }

    fn rejected(&self, gpu: &Gpu, taken: &[usize], gpus: &[&Gpu], turns: &Turns) -> Vec<Rejected> {
        let chosen =
            taken.first().map_or(u32::MAX, |at| level(self.link(gpu, self.usable[*at].at)));
        let mut others: Vec<(u32, Rejected)> = Vec::new();
        for (at, nic) in self.usable.iter().enumerate().filter(|(at, _)| !taken.contains(at)) {
            let link = self.link(gpu, nic.at);
            let serves: Vec<String> = gpus
                .iter()
                .zip(turns)
                .filter(|(_, (used, _))| *used == at)
                .map(|(other, _)| format!("GPU {}", other.index))
                .collect();
            let why = match (level(link).cmp(&chosen), serves.is_empty()) {
                _ if self.slow.contains(&at) => {
                    format!("{}, but much slower: {} Gbit/s", link_word(link), nic.best_rate())
                }
                (std::cmp::Ordering::Greater, _) => format!("{}, farther", link_word(link)),
                (_, false) => {
                    format!("{} as well, but it serves {}", link_word(link), serves.join(", "))
                }
                (_, true) => format!("{} as well, but slower or later in order", link_word(link)),
            };
            others.push((level(link), Rejected { what: nic.port(0).to_string(), why }));
        }
        for refused in &self.refused {
            let link = self.link(gpu, refused.at);
            let why = format!("{}, but {}", link_word(link), refused.why);
            others.push((level(link), Rejected { what: refused.what.clone(), why }));
        }
        others.sort_by_key(|(level, _)| *level);
        others.into_iter().map(|(_, rejected)| rejected).collect()
    }
}

/// Assigns each row a column of `nics`, each of which can be taken `rows` times.
///
/// The `turn`-th GPU of a NIC costs `turn` shares, so that equally near NICs fill evenly.
fn assign_slots(rows: usize, nics: usize, cost: impl Fn(usize, usize, usize) -> i128) -> Turns {
    if rows == 0 || nics == 0 {
        return vec![(0, 0); rows];
    }
    let columns = assign(rows, nics * rows, |row, column| cost(row, column / rows, column % rows));
    // Turns are handed out again in row order, so that ports of one NIC follow the GPUs' order.
    let mut served = vec![0; nics];
    columns
        .into_iter()
        .map(|column| {
            let at = column / rows;
            served[at] += 1;
            (at, served[at] - 1)
        })
        .collect()
}

/// Positions of GPUs in the order of their PCI addresses, or of their indices if those are unknown.
fn in_order_of_place(gpus: &[&Gpu]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..gpus.len()).collect();
    order.sort_by_key(|at| (gpus[*at].pci, gpus[*at].index));
    order
}

/// 0 for the fastest NICs, 1 for the next faster, and so on.
fn slower_ranks(nics: &[Usable<'_>]) -> Vec<usize> {
    let mut rates: Vec<f64> = nics.iter().map(Usable::best_rate).collect();
    rates.sort_by(|a, b| b.total_cmp(a));
    rates.dedup();
    nics.iter()
        .map(|nic| rates.iter().position(|rate| *rate == nic.best_rate()).unwrap_or(0))
        .collect()
}

/// Orders `mlx5_2` before `mlx5_10`.
fn nic_key(nic: &Nic) -> Vec<(String, u64)> {
    let mut parts = Vec::new();
    let mut rest = nic.name.as_str();
    while !rest.is_empty() {
        let word = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let (text, after) = rest.split_at(word);
        let number = after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len());
        let (digits, after) = after.split_at(number);
        parts.push((text.to_owned(), digits.parse().unwrap_or(0)));
        rest = after;
    }
    parts
}
