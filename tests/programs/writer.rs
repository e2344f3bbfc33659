//! A rank that writes a known stream, and records what was taken.
//!
//! `writer SEED BYTES LINE SHARERS STREAMS BOOK [FAILING BYTES]`: STREAMS is `out` (standard output
//! alone), `one` (one stream, its pieces alternately on standard output and standard error), or
//! `two` (a stream for each). BOOK is a directory; the rank's file in it has five numbers of eight
//! bytes: its process id, and for both streams the bytes that it tried to write and those that were
//! taken. The rank FAILING ends with status 7 after that many bytes.
#![allow(dead_code, clippy::exit, reason = "it shares a module, and fails when told to")]

mod stream;

use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use stream::{Form, Known, Random};

struct Output {
    known: Known,
    /// Where its two numbers are in the book.
    place: u64,
    written: u64,
}

impl Output {
    fn write(&mut self, mut file: &File, book: &File, length: usize) {
        let mut bytes = vec![0; length];
        self.known.fill(&mut bytes);
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            note(book, self.place, self.written + rest.len() as u64);
            match file.write(rest) {
                Ok(taken) => {
                    rest = &rest[taken..];
                    self.written += taken as u64;
                    note(book, self.place + 1, self.written);
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => std::process::exit(9),
            }
        }
    }
}

fn note(book: &File, place: u64, number: u64) {
    book.write_all_at(&number.to_le_bytes(), place * 8).expect("a book");
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize| arguments[at].parse::<u64>().expect("a number");
    let (seed, bytes) = (number(0), number(1));
    let form = Form { line: number(2), sharers: number(3) };
    let streams = arguments[4].as_str();
    let rank: u64 = std::env::var("RANK").expect("a rank").parse().expect("a number");
    let failing = (arguments.len() > 6 && number(6) == rank).then(|| number(7));
    let book = File::create(Path::new(&arguments[5]).join(rank.to_string())).expect("a book");
    note(&book, 0, u64::from(std::process::id()));
    let file = |end: std::os::fd::BorrowedFd<'_>| {
        File::from(end.try_clone_to_owned().expect("a descriptor"))
    };
    let files = [file(std::io::stdout().as_fd()), file(std::io::stderr().as_fd())];
    let output = |error: bool| Output {
        known: Known::new(seed, rank, error, form),
        place: if error { 3 } else { 1 },
        written: 0,
    };
    let mut outputs = vec![output(false)];
    if streams == "two" {
        outputs.push(output(true));
    }
    // Not the streams' own random numbers, because the readers use those too.
    let mut random = Random(seed.rotate_left(17) ^ rank);
    while outputs.iter().any(|output| output.written < bytes) {
        if failing.is_some_and(|at| outputs[0].written >= at) {
            std::process::exit(7);
        }
        let longest = [16, 4096, 4096, 32768][random.below(4)];
        let which = random.below(outputs.len());
        let left = usize::try_from(bytes - outputs[which].written).expect("a usize");
        let length = (1 + random.below(longest)).min(left);
        let file = match streams {
            "out" => 0,
            "one" => random.below(2),
            _ => which,
        };
        outputs[which].write(&files[file], &book, length);
    }
    if failing.is_some() {
        std::process::exit(7);
    }
}
