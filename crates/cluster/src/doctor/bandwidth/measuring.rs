//! The other process: makes the copies, times them, and compares what arrives.
//!
//! *Invariant:* what is timed or compared has been announced, so that who waits knows where this
//! process is.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use super::Way;
use super::order::{Did, End, Fault, Figures, Order, Told, Wanted};
use crate::doctor::child::{order, say};
use cuda_cluster_data::cuda::{CopyEnd, Error, PinnedMemory};
use cuda_cluster_machine::os::binding;
use cuda_cluster_model::cpuset::CpuSet;
use cuda_cluster_model::ids::GpuIndex;
use cuda_cluster_model::plan::Binding;
use cuda_cluster_model::units::HumanBytes;

const MIB: usize = 1 << 20;

/// Bytes of a copy, where there is room.
const BYTES: usize = 64 * MIB;

/// The most bytes that are compared for a way: all of the copies would take longer than they do.
const COMPARED_BYTES: usize = 16 * MIB;

/// Bytes of a copy whose time is the way's latency.
const SMALL_BYTES: usize = 8;

/// A way that takes longer for 1 MiB is measured with as much: 100 MB/s.
const SLUGGISH: Duration = Duration::from_millis(10);

/// Time of the copies of a way; all ways together have [`ALL`], and none is begun after that.
const EACH: Duration = Duration::from_millis(50);
const ALL: Duration = Duration::from_secs(10);

/// What a way takes beside its timed copies, in parts of them.
const BESIDE: u32 = 1;

/// The best of so many rounds counts, and of so many small copies.
const ROUNDS: u32 = 3;
const SMALL_COPIES: u32 = 20;

/// The most copies of a round: beyond, the driver's queue is full.
const MOST_COPIES: u32 = 512;

/// In what arrives, each page says which way it has come.
const PAGE: usize = 4096;

/// What is where nothing has arrived.
const NOTHING: u8 = 0;

/// Reads the order from standard input, and says what it finds.
pub(crate) fn main() -> ExitCode {
    let Some(order) = order::<Order>() else { return ExitCode::from(2) };
    match measure(&order) {
        Ok(()) => ExitCode::SUCCESS,
        // Nobody listens any more.
        Err(_) => ExitCode::FAILURE,
    }
}

fn measure(order: &Order) -> std::io::Result<()> {
    let mut ends = BTreeMap::new();
    for gpu in &order.gpus {
        say(&Told::Opens(gpu.index))?;
        match CopyEnd::open(gpu.pci, BYTES) {
            Ok(end) => {
                ends.insert(gpu.index, end);
            }
            Err(error) => {
                let is_full = matches!(error, Error::OutOfMemory { .. });
                let hint = error.hint().map(|hint| format!(" ({hint})")).unwrap_or_default();
                let text = format!("{error}{hint}");
                say(&Told::Unopened { gpu: gpu.index, text, is_full })?;
            }
        }
    }
    let count = u32::try_from(order.ways.len()).unwrap_or(u32::MAX).max(1);
    let each = EACH.min(ALL / count / (1 + BESIDE));
    let mut machine = Machine { gpus: &order.gpus, ends, host: None, each };
    let begun = Instant::now();
    for (at, (from, to)) in order.ways.iter().enumerate() {
        if !machine.has(*from) || !machine.has(*to) {
            continue;
        }
        if begun.elapsed() > ALL {
            let text = format!("not measured: the others took {ALL:.0?} already");
            say(&Told::LeftOut { at, text })?;
            continue;
        }
        say(&Told::Begins(at))?;
        let did = machine.way(*from, *to);
        say(&Told::Did { at, did })?;
    }
    say(&Told::Done)
}

/// Host memory near a GPU: what is sent, and what has come back.
struct Host {
    near: GpuIndex,
    sent: PinnedMemory,
    back: PinnedMemory,
    /// Why it may be far from the GPU.
    remark: Option<String>,
}

struct Machine<'a> {
    gpus: &'a [Wanted],
    ends: BTreeMap<GpuIndex, CopyEnd>,
    host: Option<Host>,
    /// Time for the copies of a way.
    each: Duration,
}

impl Machine<'_> {
    fn has(&self, end: End) -> bool {
        match end {
            End::Host => true,
            End::Gpu(gpu) => self.ends.contains_key(&gpu),
        }
    }

    fn way(&mut self, from: End, to: End) -> Did {
        let mut did = Did { figures: None, way: None, fault: None, remark: None };
        let done = match (from, to) {
            (End::Gpu(from), End::Gpu(to)) => self.between(from, to, &mut did),
            (End::Gpu(gpu), End::Host) | (End::Host, End::Gpu(gpu)) => {
                did.way = Some(Way::Host);
                self.with_host(gpu, from == End::Host, &mut did)
            }
            (End::Host, End::Host) => Ok(()),
        };
        if let Err(error) = done {
            did.fault = Some(Fault::Refused(error.to_string()));
        }
        did
    }

    /// Host memory near a GPU, with room for as much as it has.
    fn host(&mut self, gpu: GpuIndex) -> Result<Host, Error> {
        let end = &self.ends[&gpu];
        // That of another GPU is given back first.
        if let Some(host) = self.host.take().filter(|host| host.near == gpu) {
            return Ok(host);
        }
        let cpus = self.gpus.iter().find(|wanted| wanted.index == gpu);
        let cpus = cpus.and_then(|wanted| wanted.cpus.as_ref());
        let (before, remark) = match cpus {
            Some(cpus) => go_near(cpus),
            None => (None, None),
        };
        let allocated = end.pinned(end.len()).and_then(|mut sent| {
            fill(sent.bytes_mut());
            Ok((sent, end.pinned(end.len())?))
        });
        if let Some(cpus) = before {
            binding::apply(&Binding { cpus: Some(cpus), ..Binding::default() });
        }
        let (sent, back) = allocated?;
        Ok(Host { near: gpu, sent, back, remark })
    }

    /// Between the host and a GPU.
    fn with_host(&mut self, gpu: GpuIndex, there: bool, did: &mut Did) -> Result<(), Error> {
        let mut host = self.host(gpu)?;
        let Some(end) = self.ends.get_mut(&gpu) else { return Ok(()) };
        did.remark.clone_from(&host.remark);
        let most = end.len();
        let (from, to) = (End::Host, End::Gpu(gpu));
        let figures = match there {
            true => timed(most, self.each, |bytes, copies| end.write(&host.sent, bytes, copies))?,
            false => {
                timed(most, self.each, |bytes, copies| end.read(&mut host.back, bytes, copies))?
            }
        };
        did.figures = Some(figures);
        let bytes = compared_bytes(figures);
        let mark = if there { mark(from, to) } else { mark(to, from) };
        stamp(&mut host.sent.bytes_mut()[..bytes], mark);
        host.back.bytes_mut()[..bytes].fill(NOTHING);
        end.fill(NOTHING)?;
        end.write(&host.sent, bytes, 1)?;
        end.read(&mut host.back, bytes, 1)?;
        did.fault = difference(&host, bytes)
            .map(|what| Fault::WrongBytes(format!("wrong bytes, to GPU {gpu} and back: {what}")));
        self.host = Some(host);
        Ok(())
    }

    /// From a GPU to another.
    fn between(&mut self, from: GpuIndex, to: GpuIndex, did: &mut Did) -> Result<(), Error> {
        let mut host = match self.host.take() {
            // Where it is matters little to what is only compared.
            Some(host) if host.sent.bytes().len() >= self.ends[&from].len() => host,
            _ => self.host(from)?,
        };
        let Some(mut target) = self.ends.remove(&to) else { return Ok(()) };
        let done = match self.ends.get_mut(&from) {
            Some(source) => copied(source, &mut target, (from, to), &mut host, self.each, did),
            None => Ok(()),
        };
        self.ends.insert(to, target);
        self.host = Some(host);
        done
    }
}

/// Measures a pair, with access to each other's memory where the driver gives it.
fn copied(
    source: &mut CopyEnd,
    target: &mut CopyEnd,
    (from, to): (GpuIndex, GpuIndex),
    host: &mut Host,
    each: Duration,
    did: &mut Did,
) -> Result<(), Error> {
    let (there, back) = (source.reaches(target)?, target.reaches(source)?);
    did.way = Some(if there || back { Way::Peer } else { Way::Staged });
    if there {
        source.connect(target)?;
    }
    if back {
        target.connect(source)?;
    }
    let most = source.len().min(target.len());
    let figures = timed(most, each, |bytes, copies| source.send(target, bytes, copies))?;
    did.figures = Some(figures);
    did.fault = compared(source, target, (from, to), host, compared_bytes(figures))?;
    if there {
        source.disconnect(target)?;
    }
    if back {
        target.disconnect(source)?;
    }
    Ok(())
}

/// How much is compared of a way that was measured with as much.
fn compared_bytes(figures: Figures) -> usize {
    usize::try_from(figures.bytes).unwrap_or(COMPARED_BYTES).min(COMPARED_BYTES)
}

/// Sends a pattern from a GPU to another, and says what is wrong with it there.
fn compared(
    source: &mut CopyEnd,
    target: &mut CopyEnd,
    (from, to): (GpuIndex, GpuIndex),
    host: &mut Host,
    bytes: usize,
) -> Result<Option<Fault>, Error> {
    stamp(&mut host.sent.bytes_mut()[..bytes], mark(End::Gpu(from), End::Gpu(to)));
    host.back.bytes_mut()[..bytes].fill(NOTHING);
    source.write(&host.sent, bytes, 1)?;
    target.fill(NOTHING)?;
    source.send(target, bytes, 1)?;
    target.read(&mut host.back, bytes, 1)?;
    let Some(what) = difference(host, bytes) else { return Ok(None) };
    // Whether the way between the GPUs is to blame.
    source.read(&mut host.back, bytes, 1)?;
    Ok(Some(match difference(host, bytes) {
        None => Fault::WrongBytes(format!("wrong bytes arrive: {what}")),
        Some(_) => Fault::SentWrong(format!("GPU {from} has wrong bytes to send: {what}")),
    }))
}

/// Times copies of so many bytes, or of 1 MiB on a sluggish way, and small ones.
fn timed(
    most: usize,
    each: Duration,
    mut copy: impl FnMut(usize, u32) -> Result<Duration, Error>,
) -> Result<Figures, Error> {
    // The first copy of a way sets it up, and another may have waited for a CPU.
    let mut mib = Duration::MAX;
    for _ in 0..ROUNDS {
        mib = mib.min(copy(MIB, 1)?);
    }
    let bytes = if mib > SLUGGISH { MIB } else { most };
    let one = copy(bytes, 1)?;
    let begun = Instant::now();
    let copies = (each / ROUNDS).as_nanos() / one.as_nanos().max(1);
    let copies = u32::try_from(copies).unwrap_or(u32::MAX).clamp(1, MOST_COPIES);
    let mut best = Duration::MAX;
    for _ in 0..ROUNDS {
        best = best.min(copy(bytes, copies)? / copies);
        if begun.elapsed() > each {
            break;
        }
    }
    let begun = Instant::now();
    let mut small = Duration::MAX;
    for _ in 0..SMALL_COPIES {
        small = small.min(copy(SMALL_BYTES, 1)?);
        if begun.elapsed() > each {
            break;
        }
    }
    Ok(Figures {
        bytes: bytes as u64,
        gb_per_s: bytes as f64 / best.max(Duration::from_nanos(1)).as_secs_f64() / 1e9,
        latency_us: small.as_secs_f64() * 1e6,
    })
}

/// Goes to the CPUs near a GPU, so that new memory is near it. Returns the CPUs of before, and why
/// the memory may be far from the GPU all the same.
fn go_near(cpus: &CpuSet) -> (Option<CpuSet>, Option<String>) {
    let before = binding::apply(&Binding::default()).cpus;
    let there = binding::apply(&Binding { cpus: Some(cpus.clone()), ..Binding::default() });
    let is_near = !there.cpus.is_empty() && there.cpus.is_subset(cpus);
    let remark = (!is_near)
        .then(|| format!("measured from other CPUs than the GPU's: {cpus} can't be used here"));
    (Some(before).filter(|before| !before.is_empty()), remark)
}

/// What each place of the memory says of itself.
fn fill(bytes: &mut [u8]) {
    for (word, at) in bytes.chunks_exact_mut(8).zip(1u64..) {
        word.copy_from_slice(&at.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    }
}

/// A number of a way.
fn mark(from: End, to: End) -> u64 {
    let number = |end| match end {
        End::Host => 0,
        End::Gpu(gpu) => u64::from(gpu.0) + 1,
    };
    (number(from) + 1) << 32 | (number(to) + 1)
}

/// Writes into each page which way it is about to go.
fn stamp(bytes: &mut [u8], mark: u64) {
    for page in bytes.chunks_exact_mut(PAGE) {
        page[..8].copy_from_slice(&mark.to_le_bytes());
    }
}

/// How what has come back differs from what was sent.
fn difference(host: &Host, bytes: usize) -> Option<String> {
    let (sent, back) = (&host.sent.bytes()[..bytes], &host.back.bytes()[..bytes]);
    if sent == back {
        return None;
    }
    let mut wrong = sent.iter().zip(back).enumerate().filter(|(_, (one, other))| one != other);
    let first = wrong.next().map_or(0, |(at, _)| at);
    let count = 1 + wrong.count();
    let all = HumanBytes(bytes as u64);
    let verb = if count == 1 { "differs" } else { "differ" };
    Some(format!("{count} of {all} {verb}, the first at byte {first}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sluggish_ways_are_measured_with_less_and_only_once() {
        let mut copied = Vec::new();
        let figures = timed(64 * MIB, EACH, |bytes, copies| {
            copied.push((bytes, copies));
            Ok(Duration::from_millis(20))
        });
        let figures = figures.expect("figures");
        assert_eq!(figures.bytes, MIB as u64);
        assert!((figures.gb_per_s - 0.0524).abs() < 0.001, "{figures:?}");
        assert!(copied.iter().all(|(bytes, copies)| *bytes <= MIB && *copies == 1), "{copied:?}");
    }

    #[test]
    fn the_best_round_counts() {
        let mut round = 0;
        let figures = timed(64 * MIB, EACH, |bytes, copies| {
            let each = match bytes {
                SMALL_BYTES => Duration::from_micros(7),
                MIB => Duration::from_micros(100),
                _ => {
                    round += 1;
                    Duration::from_micros(if round == 3 { 1000 } else { 2000 })
                }
            };
            Ok(each * copies)
        });
        let figures = figures.expect("figures");
        assert!((figures.gb_per_s - 67.1).abs() < 0.1, "{figures:?}");
        assert!((figures.latency_us - 7.0).abs() < 0.01, "{figures:?}");
    }

    #[test]
    fn each_way_has_a_mark_of_its_own_that_is_in_each_page() {
        let gpus = [End::Host, End::Gpu(GpuIndex(0)), End::Gpu(GpuIndex(1))];
        let marks = gpus.iter().flat_map(|from| gpus.iter().map(|to| mark(*from, *to)));
        let all: std::collections::BTreeSet<u64> = marks.collect();
        assert_eq!(all.len(), 9);
        assert!(!all.contains(&0), "which is nothing");
        let mut bytes = vec![0; 3 * PAGE];
        fill(&mut bytes);
        let before = bytes.clone();
        stamp(&mut bytes, mark(gpus[1], gpus[2]));
        let differ = before.chunks(PAGE).zip(bytes.chunks(PAGE)).all(|(one, other)| one != other);
        assert!(differ);
    }
}
