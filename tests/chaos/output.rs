//! The output of `run`: ranks that write known streams, readers that are fast, slow, stalled or
//! gone, and faults in the middle. Every byte taken from a rank arrives, in order.

use std::io::{PipeReader, Read};
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use cuda_cluster::supervise::ClusterState;
use nix::sys::signal::Signal;

use crate::bench::{example, lives, told_state};
use crate::place::{Place, ended, signal, wait_for};
use crate::stream::{Form, Known, Random};
use crate::terminal::Terminal;
use crate::{Tally, draw, faults, seed};

/// How the output is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reader {
    Fast,
    Slow,
    ByteByByte,
    /// Takes this many bytes, and then none until told to continue.
    Stalled(usize),
    /// Takes this many bytes, and goes away.
    Leaving(usize),
    /// A terminal, stopped by Ctrl-S until Ctrl-Q is pressed.
    Terminal,
}

/// What happens in the middle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Nothing,
    Interrupt,
    Terminate,
    FailRank,
    KillRank,
    KillSupervisor,
    KillGuardian,
    KillClient,
    StopClientForAWhile,
    StopSupervisorForAWhile,
    StopGuardianForAWhile,
    StopRankForAWhile,
}

const FAULTS: [Fault; 12] = [
    Fault::Nothing,
    Fault::Interrupt,
    Fault::Terminate,
    Fault::FailRank,
    Fault::KillRank,
    Fault::KillSupervisor,
    Fault::KillGuardian,
    Fault::KillClient,
    Fault::StopClientForAWhile,
    Fault::StopSupervisorForAWhile,
    Fault::StopGuardianForAWhile,
    Fault::StopRankForAWhile,
];

/// Which descriptors a rank's bytes go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Streams {
    /// Standard output alone, with all byte values.
    Out,
    /// Both into one pipe, which keeps their order.
    One,
    /// Both, each into its own pipe.
    Two,
}

impl Streams {
    fn word(self) -> &'static str {
        match self {
            Self::Out => "out",
            Self::One => "one",
            Self::Two => "two",
        }
    }
}

/// One randomly drawn run.
#[derive(Clone, Copy, Debug)]
struct Story {
    key: u64,
    ranks: usize,
    streams: Streams,
    form: Form,
    prefix: bool,
    /// Of each stream.
    bytes: usize,
    reader: Reader,
    fault: Fault,
    /// Milliseconds from the first byte to the fault.
    after: u64,
    failing: (usize, usize),
}

impl Story {
    fn draw(random: &mut Random) -> Self {
        let reader = match random.below(8) {
            0 | 1 => Reader::Fast,
            2 => Reader::Slow,
            3 => Reader::ByteByByte,
            4 | 5 => Reader::Stalled(random.below(1 << 18)),
            6 => Reader::Leaving(random.below(1 << 19)),
            _ => Reader::Terminal,
        };
        let mut ranks = 1 + random.below(4);
        let mut streams = [Streams::Out, Streams::One, Streams::Two][random.below(3)];
        let mut prefix = random.below(3) == 0;
        if reader == Reader::Terminal {
            // On a terminal, prefixed lines are sanitized.
            (prefix, streams) = (false, Streams::One);
        }
        if streams == Streams::Out {
            (ranks, prefix) = (1, false);
        }
        let line = if random.below(6) == 0 { 0 } else { 1 << random.below(14) };
        let sharers = if streams == Streams::Out { 0 } else { ranks as u64 };
        let fault = draw(&FAULTS, random);
        let bytes = match reader {
            Reader::Terminal => 1 << (10 + random.below(8)),
            _ => 1 << (8 + random.below(15)),
        };
        let bytes = bytes + random.below(bytes);
        let failing = (random.below(ranks), random.below(bytes));
        let after = random.below(250) as u64;
        let (key, form) = (random.bits(), Form { sharers, line });
        Self { key, ranks, streams, form, prefix, bytes, reader, fault, after, failing }
    }

    /// Whether everything taken from the ranks must arrive.
    fn is_whole(&self) -> bool {
        let gone = matches!(self.reader, Reader::Leaving(_));
        // After a signal, `run` gives up a reader that has stalled.
        let given_up = matches!(self.reader, Reader::Stalled(_) | Reader::Terminal)
            && matches!(self.fault, Fault::Interrupt | Fault::Terminate);
        let lost = [Fault::KillSupervisor, Fault::KillGuardian, Fault::KillClient];
        !gone && !given_up && !lost.contains(&self.fault)
    }
}

/// A pipe that is read as the story prescribes.
struct Reading {
    seen: Arc<Mutex<Vec<u8>>>,
    stalled: Arc<AtomicBool>,
    go_on: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Reading {
    fn begin(pipe: PipeReader, how: Reader) -> Self {
        let (seen, stalled, go_on) = (Arc::default(), Arc::default(), Arc::default());
        let thread = {
            let (seen, stalled) = (Arc::clone(&seen), Arc::clone(&stalled));
            let go_on = Arc::clone(&go_on);
            std::thread::spawn(move || read(pipe, how, &seen, &stalled, &go_on))
        };
        Self { seen, stalled, go_on, thread }
    }

    fn length(&self) -> usize {
        self.seen.lock().expect("no panic").len()
    }
}

fn read(
    mut pipe: PipeReader,
    how: Reader,
    seen: &Mutex<Vec<u8>>,
    stalled: &AtomicBool,
    go_on: &AtomicBool,
) {
    let mut buffer = vec![0; 64 << 10];
    let mut length = 0;
    loop {
        let most = match how {
            Reader::Stalled(at) | Reader::Leaving(at) if length < at => (at - length).min(4096),
            Reader::Stalled(_) if !go_on.load(Ordering::Relaxed) => {
                stalled.store(true, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(2));
                continue;
            }
            Reader::Leaving(_) => return,
            Reader::ByteByByte if length < 4000 => 1,
            Reader::Slow => {
                std::thread::sleep(Duration::from_millis(2));
                16 << 10
            }
            _ => buffer.len(),
        };
        match pipe.read(&mut buffer[..most]) {
            Ok(taken @ 1..) => {
                seen.lock().expect("no panic").extend(&buffer[..taken]);
                length += taken;
            }
            _ => return,
        }
    }
}

/// What a rank recorded: its process, and for each stream the bytes it tried to write and those
/// taken.
#[derive(Clone, Copy, Debug, Default)]
struct Book {
    pid: u32,
    tried: [usize; 2],
    taken: [usize; 2],
}

impl Book {
    fn open(folder: &Path, rank: usize) -> Option<Self> {
        let bytes = std::fs::read(folder.join(rank.to_string())).ok()?;
        let number = |at: usize| {
            let bytes = bytes.get(at * 8..at * 8 + 8)?.try_into().ok()?;
            usize::try_from(u64::from_le_bytes(bytes)).ok()
        };
        let both = |at: usize| [number(at), number(at + 2)].map(Option::unwrap_or_default);
        let pid = u32::try_from(number(0)?).ok()?;
        Some(Self { pid, tried: both(1), taken: both(2) })
    }
}

/// Splits the output into the ranks' bytes.
fn parted(story: &Story, seen: &[u8]) -> Vec<Vec<u8>> {
    let mut ranks = vec![Vec::new(); story.ranks];
    if story.form.sharers == 0 {
        return vec![seen.to_vec()];
    }
    let sharers = story.form.sharers;
    if story.prefix {
        for line in seen.split_inclusive(|byte| *byte == b'\n') {
            let Some(line) = line.strip_prefix(b"[gpu") else { continue };
            // A reader that leaves may leave in the middle of a prefix.
            let end = line.iter().position(|byte| *byte == b']');
            let Some(line) = end.and_then(|end| line.get(end + 2..)) else { continue };
            let Some(first) = line.iter().find(|byte| **byte >= 128) else { continue };
            let rank = usize::try_from((u64::from(*first) - 128) % sharers).expect("a rank");
            ranks[rank].extend_from_slice(line);
        }
        return ranks;
    }
    // ASCII bytes are the program's own; a line feed belongs to the stream of the byte before it.
    let mut last = None;
    for byte in seen {
        match *byte {
            128.. => {
                let rank = usize::try_from((u64::from(*byte) - 128) % sharers).expect("a rank");
                ranks[rank].push(*byte);
                last = Some(rank);
            }
            b'\n' | b'\r' => {
                if let Some(rank) = last {
                    ranks[rank].push(*byte);
                }
            }
            _ => last = None,
        }
    }
    ranks
}

/// Compares a rank's stream with what it must be; returns what is wrong.
fn compare(
    story: &Story,
    rank: usize,
    error: bool,
    seen: &[u8],
    book: &Book,
) -> Result<(), String> {
    let mut expected = vec![0; book.tried[usize::from(error)]];
    Known::new(story.key, rank as u64, error, story.form).fill(&mut expected);
    let taken = book.taken[usize::from(error)];
    let mut seen = seen;
    if story.prefix && !expected.starts_with(seen) {
        // An end of line that the prefix brought.
        seen = seen.strip_suffix(b"\n").unwrap_or(seen);
    }
    let same = seen.iter().zip(&expected).take_while(|(one, other)| one == other).count();
    if same < seen.len() {
        let around = |bytes: &[u8]| bytes[same..bytes.len().min(same + 16)].to_vec();
        return Err(format!(
            "byte {same} of {} ({} tried, {taken} taken): {:?} instead of {:?}",
            seen.len(),
            expected.len(),
            around(seen),
            around(&expected),
        ));
    }
    if story.is_whole() && seen.len() < taken {
        return Err(format!("{} bytes of {taken} arrived", seen.len()));
    }
    Ok(())
}

/// How the output is read.
enum Watch {
    Pipes(Vec<Reading>),
    Terminal(Terminal),
}

/// One run under way.
struct Run<'a> {
    place: &'a Place,
    story: Story,
    books: tempfile::TempDir,
    client: Child,
    watch: Watch,
}

impl<'a> Run<'a> {
    fn begin(place: &'a Place, story: Story) -> Self {
        let books = tempfile::tempdir().expect("a directory");
        let (ranks, writer) = (story.ranks.to_string(), example("writer").display().to_string());
        let mut arguments = vec!["run", "--topology", "dgx-h100", "--simulate", "--n-workers"];
        arguments.extend([ranks.as_str(), "--name", "output"]);
        if story.prefix {
            arguments.push("--prefix");
        }
        let numbers = [story.key, story.bytes as u64, story.form.line, story.form.sharers];
        let mut words: Vec<String> = numbers.iter().map(u64::to_string).collect();
        words.extend([story.streams.word().to_owned(), books.path().display().to_string()]);
        if story.fault == Fault::FailRank {
            words.extend([story.failing.0.to_string(), story.failing.1.to_string()]);
        }
        let mut command = place.command(&arguments);
        command.arg("--").arg(writer).args(words);
        let (client, watch) = match story.reader {
            Reader::Terminal => {
                let mut terminal = Terminal::open(true);
                let client = terminal.adopt(&command).spawn().expect("it starts");
                terminal.stop();
                (client, Watch::Terminal(terminal))
            }
            _ => Self::piped(command, &story),
        };
        Self { place, story, books, client, watch }
    }

    fn piped(mut command: Command, story: &Story) -> (Child, Watch) {
        let (output, writer) = std::io::pipe().expect("a pipe");
        let mut pipes = vec![output];
        if story.streams == Streams::Two {
            let (error, writer) = std::io::pipe().expect("a pipe");
            command.stderr(writer);
            pipes.push(error);
        } else if story.streams == Streams::One {
            command.stderr(writer.try_clone().expect("a descriptor"));
        }
        let client = command.stdout(writer).spawn().expect("it starts");
        // The command holds the writing ends.
        drop(command);
        let readings = pipes.into_iter().map(|pipe| Reading::begin(pipe, story.reader));
        (client, Watch::Pipes(readings.collect()))
    }

    fn books(&self) -> Vec<Book> {
        let open = |rank| Book::open(self.books.path(), rank).unwrap_or_default();
        (0..self.story.ranks).map(open).collect()
    }

    /// Waits until the run is halfway, or over already. Returns the state while there is a
    /// supervisor.
    fn middle(&mut self) -> Option<ClusterState> {
        let begun = wait_for(|| {
            let state = told_state(&self.place.run_directory());
            let books = self.books();
            let written = books.iter().all(|book| book.taken[0] > 0);
            // Ranks with little output, or that failed, have ended, and `run` waits for its reader.
            let silent =
                books.iter().any(|book| book.pid > 0) && books.iter().all(|book| !lives(book.pid));
            let over = self.client.try_wait().expect("a child").is_some();
            ((written && state.is_some()) || silent || over).then_some(state)
        });
        let state = begun.unwrap_or_else(|| panic!("it begins: {}", self.place.post_mortem()));
        if let (Reader::Stalled(_), Watch::Pipes(readings)) = (self.story.reader, &self.watch) {
            // Fewer bytes than it waits for may come, or none in one of the pipes.
            wait_for(|| {
                let stalled = readings.iter().any(|it| it.stalled.load(Ordering::Relaxed));
                let over = self.client.try_wait().expect("a child").is_some();
                (stalled || over).then_some(())
            });
        }
        std::thread::sleep(Duration::from_millis(self.story.after));
        state
    }

    /// Injects the fault; returns whether it had a target.
    fn strike(&mut self, state: Option<&ClusterState>, random: &mut Random) -> bool {
        if self.client.try_wait().expect("a child").is_some() {
            return false;
        }
        let client = self.client.id();
        let others = [
            Fault::Nothing,
            Fault::FailRank,
            Fault::Interrupt,
            Fault::Terminate,
            Fault::KillClient,
        ];
        let supervisor = state.map_or(0, |state| state.supervisor_pid);
        let guardian = state.and_then(|state| state.guardian_pid).unwrap_or(0);
        let rank = self.books()[random.below(self.story.ranks)].pid;
        if !others.contains(&self.story.fault)
            && ![supervisor, guardian, rank].iter().all(|pid| *pid > 0 && lives(*pid))
        {
            return false;
        }
        let for_a_while = |pid: u32, random: &mut Random| {
            signal(pid, Signal::SIGSTOP);
            std::thread::sleep(Duration::from_millis(random.below(400) as u64));
            signal(pid, Signal::SIGCONT);
        };
        match self.story.fault {
            Fault::Nothing | Fault::FailRank => {}
            Fault::Interrupt => signal(client, Signal::SIGINT),
            Fault::Terminate => signal(client, Signal::SIGTERM),
            Fault::KillRank => signal(rank, Signal::SIGKILL),
            Fault::KillSupervisor => signal(supervisor, Signal::SIGKILL),
            Fault::KillGuardian => signal(guardian, Signal::SIGKILL),
            Fault::KillClient => signal(client, Signal::SIGKILL),
            Fault::StopClientForAWhile => for_a_while(client, random),
            Fault::StopSupervisorForAWhile => for_a_while(supervisor, random),
            Fault::StopGuardianForAWhile => for_a_while(guardian, random),
            Fault::StopRankForAWhile => for_a_while(rank, random),
        }
        true
    }

    /// While the reader stalls: everything that has to end does.
    fn ends_without_its_reader(&mut self) {
        let whole = [Fault::Interrupt, Fault::Terminate, Fault::KillClient];
        if whole.contains(&self.story.fault) {
            let said = ended(&mut self.client);
            assert!(said.is_some(), "the reader keeps it alive: {}", self.place.post_mortem());
        }
        let ranks = [Fault::KillRank, Fault::FailRank, Fault::KillSupervisor, Fault::KillGuardian];
        // A rank that is stalled itself does not come to its failure.
        let failed = self.story.fault != Fault::FailRank
            || self.books()[self.story.failing.0].taken[0] >= self.story.failing.1;
        if ranks.contains(&self.story.fault) && failed {
            self.place.wait_until("the reader keeps ranks alive", || {
                let alive = self.place.pids();
                self.books().iter().all(|book| !alive.contains(&book.pid)).then_some(())
            });
        }
    }

    fn go_on(&mut self) {
        match &mut self.watch {
            Watch::Pipes(readings) => {
                readings.iter().for_each(|reading| reading.go_on.store(true, Ordering::Relaxed));
            }
            Watch::Terminal(terminal) => terminal.resume(),
        }
    }

    /// Reads until the end, and returns what came, one entry per pipe.
    fn finish(mut self) -> (ExitStatus, Vec<Book>, Vec<Vec<u8>>) {
        let mut last = 0;
        let mut said = None;
        // It is not over while something still arrives.
        while said.is_none() {
            said = ended(&mut self.client);
            let length = match &self.watch {
                Watch::Pipes(readings) => readings.iter().map(Reading::length).sum(),
                Watch::Terminal(terminal) => terminal.seen().len(),
            };
            assert!(
                said.is_some() || length > last,
                "run stays, {length} bytes have come: {}",
                self.place.post_mortem()
            );
            last = length;
        }
        let books = self.books();
        let seen = match self.watch {
            Watch::Pipes(readings) => readings
                .into_iter()
                .map(|reading| {
                    reading.thread.join().expect("no panic");
                    Arc::into_inner(reading.seen).expect("its last").into_inner().expect("no panic")
                })
                .collect(),
            Watch::Terminal(terminal) => vec![terminal.read_to_end()],
        };
        (said.expect("ended"), books, seen)
    }
}

/// The exit codes that a story permits.
fn codes(story: &Story, struck: bool, books: &[Book]) -> Vec<Option<i32>> {
    let streams = if story.streams == Streams::Two { 2 } else { 1 };
    let complete =
        books.iter().all(|book| book.taken[..streams].iter().all(|it| *it == story.bytes));
    let mut codes = Vec::new();
    let gone = matches!(story.reader, Reader::Leaving(_));
    match story.fault {
        Fault::Interrupt if struck => codes.push(Some(128 + 2)),
        Fault::Terminate if struck => codes.push(Some(128 + 15)),
        Fault::KillRank if struck => codes.push(Some(128 + 9)),
        Fault::FailRank => codes.push(Some(7)),
        Fault::KillClient if struck => codes.push(None),
        Fault::KillSupervisor | Fault::KillGuardian if struck => {
            codes.extend((1..256).map(Some));
        }
        _ => {}
    }
    let failed = matches!(story.fault, Fault::FailRank);
    if complete && !failed {
        // Whatever came may have come too late.
        codes.push(Some(0));
    }
    if gone {
        // As a pipe's writer ends; what ended the ranks meanwhile may be told instead.
        codes.extend([Some(128 + 13), Some(1), Some(9)]);
    }
    codes
}

fn tell(place: &Place, story: Story, random: &mut Random, tally: &Tally) {
    let mut run = Run::begin(place, story);
    let state = run.middle();
    let cgroup = place.cgroup();
    let struck = run.strike(state.as_ref(), random);
    if struck && matches!(story.reader, Reader::Stalled(_) | Reader::Terminal) {
        run.ends_without_its_reader();
    }
    run.go_on();
    let (said, books, seen) = run.finish();
    let killed = [Fault::KillSupervisor, Fault::KillGuardian].contains(&story.fault);
    place.gone(tally, cgroup.as_deref().filter(|_| !killed));
    let about = format!("{story:?}\n{said}, {books:?}");
    let codes = codes(&story, struck, &books);
    assert!(codes.contains(&said.code()), "{about}\n{}", String::from_utf8_lossy(&seen[0]).trim());
    for (at, seen) in seen.iter().enumerate() {
        for (rank, bytes) in parted(&story, seen).iter().enumerate() {
            let compared = compare(&story, rank, at == 1, bytes, &books[rank]);
            assert_eq!(compared, Ok(()), "rank {rank}, pipe {at}: {about}");
        }
    }
}

#[test]
fn no_byte_of_a_run_is_lost_whoever_reads_and_whatever_fails() {
    let mut random = Random(seed());
    let mut tally = Tally::new("output");
    let place = Place::new("output");
    for turn in 0..faults(10) {
        let story = Story::draw(&mut random);
        println!("output {turn}: {story:?}");
        tell(&place, story, &mut random, &tally);
        if story.fault != Fault::Nothing || story.reader != Reader::Fast {
            let reader = format!("{:?}", story.reader);
            let reader = reader.split('(').next().unwrap_or_default();
            tally.count(format!("{:?}/{reader}", story.fault));
        }
    }
}

/// A check that detects nothing would let everything pass.
#[test]
fn a_lost_a_doubled_and_a_foreign_byte_are_seen() {
    let form = Form { sharers: 2, line: 16 };
    let mut story = Story::draw(&mut Random(1));
    story = Story { ranks: 2, streams: Streams::One, form, prefix: false, ..story };
    story = Story { reader: Reader::Fast, fault: Fault::Nothing, ..story };
    let book = Book { pid: 1, tried: [4096, 0], taken: [4096, 0] };
    let written = |rank| {
        let mut bytes = vec![0; 4096];
        Known::new(story.key, rank, false, form).fill(&mut bytes);
        bytes
    };
    let [one, two] = [written(0), written(1)];
    let (mut lines, mut others) = (one.split_inclusive(|it| *it == b'\n'), two.chunks(4096));
    let mut seen = b"note: words of ours\n".to_vec();
    seen.extend(lines.by_ref().take(20).flatten());
    let end = seen.len();
    seen.extend(others.by_ref().flatten());
    seen.extend(lines.flatten());
    seen.extend(b"run: more words\n");
    let judge = |seen: &[u8]| {
        let ranks = parted(&story, seen);
        (0..2).all(|rank| compare(&story, rank, false, &ranks[rank], &book).is_ok())
    };
    assert!(judge(&seen));
    for at in [20, end - 1, end, end + 4000, seen.len() - 40] {
        let mut lost = seen.clone();
        lost.remove(at);
        let mut doubled = seen.clone();
        doubled.insert(at, seen[at]);
        let mut foreign = seen.clone();
        foreign[at] ^= 1;
        assert!(![lost, doubled, foreign].iter().any(|seen| judge(seen)), "at {at}");
    }
    let mut cut = seen.clone();
    cut.truncate(end);
    assert!(!judge(&cut), "the rest is missing");
}
