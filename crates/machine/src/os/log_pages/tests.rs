//! Every line once and in order: at any page size, in either direction, while lines are added and
//! files rotated.

use std::collections::BTreeMap;
use std::time::{Duration, UNIX_EPOCH};

use proptest::prelude::*;

use super::super::log_file::{LogReader, LogWriter, Selection};
use super::*;

type Told = (Place, String);

fn told(line: &Found<'_>) -> Told {
    (line.place, String::from_utf8_lossy(line.text).into_owned())
}

/// As many lines as a page has, and the cursor for the next page.
fn page(path: &Path, start: Start, direction: Direction, count: usize) -> (Vec<Told>, Place) {
    let mut pages = Pages::open(path, start, direction).expect("readable");
    let mut lines = Vec::new();
    while lines.len() < count {
        let Some(line) = pages.line().expect("readable") else { break };
        lines.push(told(&line));
        pages.pass();
    }
    (lines, pages.boundary())
}

/// All lines before a start, oldest first, read in pages of this size.
fn all_back(path: &Path, mut start: Start, count: usize) -> Vec<Told> {
    let mut all = Vec::new();
    loop {
        let (lines, boundary) = page(path, start, Direction::Back, count);
        if lines.is_empty() {
            all.reverse();
            return all;
        }
        all.extend(lines);
        start = Start::At(boundary);
    }
}

fn texts(lines: &[Told]) -> Vec<&str> {
    lines.iter().map(|(_, text)| text.as_str()).collect()
}

/// What is written: numbered lines, so that none is like another, of this length or more, in one
/// piece or two.
fn written() -> impl Strategy<Value = Vec<(usize, bool)>> {
    let length = prop_oneof![20 => 0usize..200, 1 => 1000usize..300_000];
    proptest::collection::vec((length, any::<bool>()), 0..60)
}

fn append(writer: &mut LogWriter, number: usize, length: usize, halves: bool) -> String {
    let text = format!("{number} {}", "x".repeat(length));
    let line = format!("{text}\n");
    let at = |part| UNIX_EPOCH + Duration::from_millis(number as u64 * 10 + part);
    // Between two pieces, the writer ends a line that keeps a file from its rotation.
    let halves = halves && length < 100;
    let (first, second) = line.split_at(if halves { line.len() / 2 } else { 0 });
    writer.append(first.as_bytes(), at(0));
    writer.append(second.as_bytes(), at(1));
    text
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_log_is_read_in_pages_of_any_size_in_either_direction(
        lines in written(), limit in 100u64..400_000, count in 1usize..20,
    ) {
        let folder = tempfile::tempdir().expect("a directory");
        let path = folder.path().join("gpu0.log");
        let mut writer = LogWriter::new(path.clone(), limit, 100);
        let mut expected = Vec::new();
        for (number, (length, halves)) in lines.into_iter().enumerate() {
            expected.push(append(&mut writer, number, length, halves));
        }
        let back = all_back(&path, Start::End, count);
        prop_assert_eq!(texts(&back), expected.clone());
        let (mut forth, mut start) = (Vec::new(), Place::default());
        loop {
            let (lines, boundary) = page(&path, Start::At(start), Direction::Forth, count);
            if lines.is_empty() { break }
            forth.extend(lines);
            start = boundary;
        }
        prop_assert_eq!(&forth, &back);
        prop_assert!(back.is_sorted_by_key(|(place, _)| *place));
        // From any line, and from inside of any line.
        for (at, (place, _)) in back.iter().enumerate().step_by(7) {
            let (later, _) = page(&path, Start::At(*place), Direction::Forth, count);
            prop_assert_eq!(&later[..], &back[at..back.len().min(at + count)]);
            let inside = Place { offset: place.offset + 1, ..*place };
            let (earlier, _) = page(&path, Start::At(inside), Direction::Back, 1);
            prop_assert_eq!(&earlier[..], &back[at..=at]);
            let stamp = Pages::open(&path, Start::At(*place), Direction::Forth)
                .and_then(|mut pages| Ok(pages.line()?.map(|line| line.stamp)));
            let stamp = stamp.expect("readable").expect("a line");
            let start = Start::At(place_of(&path, stamp).expect("readable"));
            let (first, _) = page(&path, start, Direction::Forth, 1);
            prop_assert_eq!(&first[..], &back[at..=at]);
        }
    }

    #[test]
    fn a_reader_that_follows_loses_nothing_and_repeats_nothing(
        lines in written(), limit in 100u64..100_000, looks in 1usize..6, count in 1usize..9,
    ) {
        let folder = tempfile::tempdir().expect("a directory");
        let path = folder.path().join("gpu0.log");
        let mut writer = LogWriter::new(path.clone(), limit, 100);
        let (mut expected, mut seen) = (Vec::new(), Vec::new());
        let mut start = Place::default();
        let mut open_page = Pages::open(&path, Start::End, Direction::Back).expect("readable");
        let mut before = Vec::new();
        for (number, (length, halves)) in lines.into_iter().enumerate() {
            expected.push(append(&mut writer, number, length, halves));
            if number % looks == 0 {
                let (lines, boundary) = page(&path, Start::At(start), Direction::Forth, count);
                seen.extend(lines);
                start = boundary;
            }
            // A page that was opened before goes on backwards meanwhile.
            if number == 20 {
                open_page = Pages::open(&path, Start::End, Direction::Back).expect("readable");
            }
            if number >= 20 && let Some(line) = open_page.line().expect("readable") {
                before.push(told(&line));
                open_page.pass();
            }
        }
        loop {
            let (lines, boundary) = page(&path, Start::At(start), Direction::Forth, count);
            if lines.is_empty() { break }
            seen.extend(lines);
            start = boundary;
        }
        prop_assert_eq!(texts(&seen), expected.clone());
        before.reverse();
        let from = expected.len().min(21) - before.len().min(21);
        prop_assert_eq!(texts(&before), &expected[from..from + before.len()]);
    }

    #[test]
    fn logs_are_merged_by_time_at_any_page_size_and_the_other_way_round_alike(
        logs in proptest::collection::vec(proptest::collection::vec(0u64..50, 0..40), 1..5),
        count in 1usize..12,
    ) {
        let folder = tempfile::tempdir().expect("a directory");
        let mut expected = Vec::new();
        for (log, steps) in logs.iter().enumerate() {
            let path = folder.path().join(log.to_string());
            let mut writer = LogWriter::new(path, 500, 100);
            let mut time = 0;
            for (line, step) in steps.iter().enumerate() {
                time += step / 10;
                let text = format!("{log} {line}");
                let at = UNIX_EPOCH + Duration::from_millis(time);
                writer.append(format!("{text}\n").as_bytes(), at);
                expected.push((time, log, text));
            }
        }
        // As the sort of `logs` puts them: by time, and then as the logs were named.
        expected.sort_by_key(|(time, log, _)| (*time, *log));
        let expected: Vec<String> = expected.into_iter().map(|(_, _, text)| text).collect();
        for direction in [Direction::Back, Direction::Forth] {
            let names: Vec<String> = (0..logs.len()).map(|log| log.to_string()).collect();
            let first = if direction == Direction::Back { Start::End } else { Start::At(Place::default()) };
            let mut starts: BTreeMap<String, Start> = names.iter().map(|name| (name.clone(), first)).collect();
            let mut seen = Vec::new();
            loop {
                let open = |name: &String| {
                    let pages = Pages::open(&folder.path().join(name), starts[name], direction);
                    (name.clone(), pages.expect("readable"))
                };
                let mut merged = Merged::new(names.iter().map(open).collect(), direction).expect("readable");
                let before = seen.len();
                while seen.len() < before + count && let Some((_, pages)) = merged.peek() {
                    let line = pages.line().expect("readable").expect("a line");
                    seen.push(told(&line).1);
                    merged.pass().expect("readable");
                }
                starts = merged.boundaries().map(|(name, place)| (name.to_owned(), Start::At(place))).collect();
                if seen.len() == before { break }
            }
            if direction == Direction::Back { seen.reverse() }
            prop_assert_eq!(&seen, &expected);
        }
    }
}

#[test]
fn what_a_rotation_has_removed_is_said_and_the_rest_is_there() {
    let folder = tempfile::tempdir().expect("a directory");
    let path = folder.path().join("gpu0.log");
    let mut writer = LogWriter::new(path.clone(), 64, 2);
    for number in 0..10 {
        append(&mut writer, number, 20, false);
    }
    let (_, all) = LogReader::open(&path, Selection::default()).expect("readable");
    // The first one says what is missing.
    let all: Vec<String> =
        all[1..].iter().map(|line| String::from_utf8_lossy(&line.text).into_owned()).collect();
    for (start, direction) in
        [(Start::End, Direction::Back), (Start::At(Place::default()), Direction::Forth)]
    {
        let mut pages = Pages::open(&path, start, direction).expect("readable");
        let mut seen = Vec::new();
        while let Some(line) = pages.line().expect("readable") {
            seen.push(told(&line).1);
            pages.pass();
        }
        if direction == Direction::Back {
            seen.reverse();
        }
        assert_eq!(seen, all);
        assert!(pages.misses());
    }
}

#[test]
fn a_long_line_is_read_in_part_and_says_how_much_is_missing() {
    let folder = tempfile::tempdir().expect("a directory");
    let path = folder.path().join("gpu0.log");
    let mut writer = LogWriter::new(path.clone(), 64 << 20, 2);
    append(&mut writer, 1, 0, false);
    let long = append(&mut writer, 2, 3 << 20, false);
    append(&mut writer, 3, 0, false);
    for (start, direction) in
        [(Start::End, Direction::Back), (Start::At(Place::default()), Direction::Forth)]
    {
        let mut pages = Pages::open(&path, start, direction).expect("readable");
        assert!(pages.line().expect("readable").is_some());
        pages.pass();
        let line = pages.line().expect("readable").expect("the long one");
        assert_eq!((line.text.len(), line.cut), (LONGEST, (long.len() - LONGEST) as u64));
    }
    writer.append(b"no end yet", UNIX_EPOCH);
    let (_, text, cut) = unfinished(&path).expect("readable").expect("a line");
    assert_eq!((text.as_slice(), cut), (&b"no end yet"[..], 0));
}

#[test]
fn a_line_without_a_level_has_that_of_the_line_with_which_it_came() {
    let folder = tempfile::tempdir().expect("a directory");
    let path = folder.path().join("gpu0.log");
    let mut writer = LogWriter::new(path.clone(), 64 << 20, 2);
    let at = |ms| UNIX_EPOCH + Duration::from_millis(ms);
    writer.append(b"plain\nERROR it failed\n  here\n  and here\n", at(0));
    writer.append(b"soon after\n", at(900));
    writer.append(b"much later\n", at(2500));
    writer.append(b"WARNING:x:y\n", at(3000));
    writer.append(format!("{}\n", "x".repeat(200_000)).as_bytes(), at(3000));
    writer.append(b"far away\n", at(3000));
    let (error, warning) = (Some(LogLevel::Error), Some(LogLevel::Warning));
    let expected = [None, error, error, error, error, None, warning, warning, None];
    for (start, direction) in
        [(Start::End, Direction::Back), (Start::At(Place::default()), Direction::Forth)]
    {
        let mut pages = Pages::open(&path, start, direction).expect("readable");
        let mut levels = Vec::new();
        while pages.line().expect("readable").is_some() {
            levels.push(pages.level().expect("readable"));
            pages.pass();
        }
        if direction == Direction::Back {
            levels.reverse();
        }
        assert_eq!(levels, expected, "{direction:?}");
    }
}

#[test]
fn places_read_as_they_are_written_and_others_are_refused() {
    let place = Place { part: 3, offset: 1234 };
    assert_eq!(place.to_string().parse::<Place>().expect("a place"), place);
    for text in ["", "3", "3:", ":4", "-1:2", "1:2:3", "a:b"] {
        assert!(text.parse::<Place>().is_err(), "{text}");
    }
}
