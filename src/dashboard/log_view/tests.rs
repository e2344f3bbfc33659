//! Pages of several logs: every line once, in order, and as it may be shown.

use proptest::prelude::*;

use super::*;

/// A run directory with the logs of processes: the milliseconds and texts of their lines.
fn logs(folder: &Path, logs: &[(&str, &[(u64, &str)])]) -> Paths {
    let paths = Paths::at(folder);
    std::fs::create_dir_all(paths.logs()).expect("a directory");
    for (process, lines) in logs {
        let line = |(ms, text): &(u64, &str)| {
            let at = std::time::UNIX_EPOCH + Duration::from_millis(*ms);
            format!("{} {text}\n", humantime::format_rfc3339_millis(at))
        };
        let text: String = lines.iter().map(line).collect();
        std::fs::write(paths.log(process), text).expect("written");
    }
    paths
}

fn ask(from: Begin, filter: Filter) -> Ask {
    Ask { processes: BTreeSet::new(), filter, from }
}

fn texts(told: &Lines) -> Vec<&str> {
    told.lines.iter().map(|line| line.text.as_str()).collect()
}

fn as_cursor(places: &BTreeMap<String, String>) -> Cursor {
    let place = |place: &String| place.parse().expect("a place");
    places.iter().map(|(name, at)| (name.clone(), place(at))).collect()
}

const TWO: &[(&str, &[(u64, &str)])] = &[
    ("gpu0", &[(1, "INFO a"), (4, "ERROR b TOKEN=hush"), (4, "  File x"), (9000, "plain")]),
    ("gpu1", &[(2, "WARNING c"), (4, "INFO d"), (5, "\u{1b}[31mRed\u{1b}[0m Hat INFO")]),
];

#[test]
fn the_lines_of_all_processes_come_as_one_masked_and_with_their_levels() {
    let folder = tempfile::tempdir().expect("a directory");
    let paths = logs(folder.path(), TWO);
    let told = look(&paths, &ask(Begin::End, Filter::default())).expect("readable");
    let all = ["INFO a", "WARNING c", "ERROR b TOKEN=***", "  File x", "INFO d", "Red Hat INFO"];
    assert_eq!(texts(&told), [&all[..], &["plain"]].concat());
    assert!(told.done && told.searched_to.is_none() && told.missing.is_empty());
    let levels: Vec<&str> =
        told.lines.iter().map(|line| line.level.as_deref().unwrap_or("-")).collect();
    assert_eq!(levels, ["info", "warning", "error", "error", "info", "info", "-"]);
    assert_eq!(told.processes, ["gpu0", "gpu1"]);
}

#[test]
fn lines_are_found_by_text_as_it_is_shown_and_by_level() {
    let folder = tempfile::tempdir().expect("a directory");
    let paths = logs(folder.path(), TWO);
    let found = |text: Option<&str>, level: Option<&str>| {
        let level = level.map(|level| level.parse().expect("a level"));
        let told = look(&paths, &ask(Begin::End, Filter::new(text, level))).expect("readable");
        told.lines.into_iter().map(|line| line.text).collect::<Vec<_>>()
    };
    assert_eq!(found(Some("fILE"), None), ["  File x"]);
    assert_eq!(found(Some("red hat"), None), ["Red Hat INFO"], "colours are not text");
    assert_eq!(found(Some("token=***"), None), ["ERROR b TOKEN=***"]);
    assert_eq!(found(Some("hush"), None), [""; 0], "what is masked is not searched");
    assert_eq!(found(None, Some("error")), ["ERROR b TOKEN=***", "  File x"]);
    assert_eq!(found(None, Some("warning")).len(), 3);
    assert_eq!(found(None, Some("debug")).len(), 7);
    assert_eq!(found(Some("i"), Some("error")), ["  File x"]);
}

#[test]
fn a_link_to_a_line_leads_to_it_with_what_others_wrote_at_that_time() {
    let folder = tempfile::tempdir().expect("a directory");
    let paths = logs(folder.path(), TWO);
    let all = look(&paths, &ask(Begin::End, Filter::default())).expect("readable");
    let line = all.lines.iter().find(|line| line.text == "INFO d").expect("it");
    let at = Begin::Line(line.process.clone(), line.place.parse().expect("a place"));
    let told = look(&paths, &ask(at, Filter::default())).expect("readable");
    assert_eq!(texts(&told), ["ERROR b TOKEN=***", "  File x", "INFO d", "Red Hat INFO", "plain"]);
    let before = look(&paths, &ask(Begin::Before(as_cursor(&told.top)), Filter::default()));
    assert_eq!(texts(&before.expect("readable")), ["INFO a", "WARNING c"]);
    let elsewhere = Begin::Line("../secret".to_owned(), Place::default());
    let told = look(&paths, &ask(elsewhere, Filter::default())).expect("readable");
    assert_eq!(told.lines.len(), 7, "all from the beginning");
}

#[test]
fn a_cut_line_is_told_whole_and_what_is_written_is_told_before_its_end() {
    let folder = tempfile::tempdir().expect("a directory");
    let long = format!("{} needle KEY=hush", "x".repeat(100_000));
    let paths = logs(folder.path(), &[("gpu0", &[(1, "a"), (2, &long)])]);
    let mut log = std::fs::OpenOptions::new().append(true).open(paths.log("gpu0")).expect("a log");
    io::Write::write_all(&mut log, b"1970-01-01T00:00:00.003Z no end").expect("written");
    let found =
        look(&paths, &ask(Begin::End, Filter::new(Some("NEEDLE"), None))).expect("readable");
    let [line] = &found.lines[..] else { panic!("{found:?}") };
    assert_eq!((line.text.len(), line.more), (LINE_BYTES, (long.len() - LINE_BYTES) as u64));
    let place = line.place.parse().expect("a place");
    let (text, more) = whole(&paths.log("gpu0"), place).expect("readable").expect("a line");
    assert_eq!((text, more), (long.replace("hush", "***"), 0));
    let beside = Place { offset: place.offset + 1, ..place };
    assert_eq!(whole(&paths.log("gpu0"), beside).expect("readable"), None);
    let told = look(&paths, &ask(Begin::End, Filter::default())).expect("readable");
    assert_eq!(told.unfinished.iter().map(|line| &line.text[..]).collect::<Vec<_>>(), ["no end"]);
}

#[test]
fn the_file_is_the_log_with_secrets_masked() {
    let folder = tempfile::tempdir().expect("a directory");
    let paths = logs(folder.path(), TWO);
    let odd = b"1970-01-01T00:00:09.000Z \xff\xfe not UTF-8\r\n";
    let mut log = std::fs::OpenOptions::new().append(true).open(paths.log("gpu0")).expect("a log");
    io::Write::write_all(&mut log, odd).expect("written");
    let poured = |processes: &[&str]| {
        let processes: Vec<String> = processes.iter().map(|&name| name.to_owned()).collect();
        let mut all = Vec::new();
        let take = |piece: Vec<u8>| {
            all.extend(piece);
            true
        };
        pour(&paths, &processes, take).expect("readable");
        all
    };
    let stored = std::fs::read(paths.log("gpu0")).expect("a log");
    let masked = [&stored[..stored.len() - odd.len()], b""].concat();
    let masked = String::from_utf8(masked).expect("text").replace("hush", "***");
    assert_eq!(poured(&["gpu0"]), [masked.as_bytes(), odd].concat());
    let both = String::from_utf8_lossy(&poured(&["gpu0", "gpu1"])).into_owned();
    assert_eq!(both.lines().count(), 8);
    assert!(both.starts_with("1970-01-01T00:00:00.001Z gpu0 INFO a\n"), "{both}");
}

#[test]
fn cursors_read_as_they_are_written_and_others_are_refused() {
    let read = cursor("gpu0:0:12,gpu.1:2:0").expect("a cursor");
    assert_eq!(read["gpu.1"], Place { part: 2, offset: 0 });
    for wrong in ["gpu0", "gpu0:1", "gpu0:a:1", "gpu0:0:1;gpu1:0:1"] {
        assert!(cursor(wrong).is_err(), "{wrong}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// As `logs` sorts them, whatever is on which page.
    #[test]
    fn every_line_is_on_one_page_in_either_direction(
        all in proptest::collection::vec(
            proptest::collection::vec((0u64..30, 0usize..2000), 0..300), 1..4),
        wanted in prop_oneof![Just(None), Just(Some("7"))],
    ) {
        let folder = tempfile::tempdir().expect("a directory");
        let (mut expected, mut written) = (Vec::new(), Vec::new());
        for (number, lines) in all.iter().enumerate() {
            let mut time = 0;
            let line = |(at, (step, length)): (usize, &(u64, usize))| {
                time += step / 10;
                (time, format!("{number} {at} {}", "x".repeat(*length)))
            };
            let lines: Vec<(u64, String)> = lines.iter().enumerate().map(line).collect();
            expected.extend(lines.iter().map(|(time, text)| (*time, number, text.clone())));
            written.push((format!("gpu{number}"), lines));
        }
        expected.sort_by_key(|(time, number, _)| (*time, *number));
        let expected: Vec<String> = expected.into_iter().map(|(_, _, text)| text)
            .filter(|text| wanted.is_none_or(|wanted| text.contains(wanted))).collect();
        let lent: Vec<(&str, Vec<(u64, &str)>)> = written.iter()
            .map(|(name, lines)| (&name[..], lines.iter().map(|(at, text)| (*at, &text[..])).collect()))
            .collect();
        let lent: Vec<(&str, &[(u64, &str)])> =
            lent.iter().map(|(name, lines)| (*name, &lines[..])).collect();
        let paths = logs(folder.path(), &lent);
        let filter = Filter::new(wanted, None);

        let (mut back, mut from) = (Vec::new(), Begin::End);
        loop {
            let told = look(&paths, &ask(from, filter.clone())).expect("readable");
            let bytes: usize = told.lines.iter().map(|line| line.text.len()).sum();
            prop_assert!(told.lines.len() <= LINES && bytes <= BYTES + LINE_BYTES);
            back.splice(0..0, told.lines.iter().map(|line| line.text.clone()));
            if told.done { break }
            from = Begin::Before(as_cursor(&told.top));
        }
        prop_assert_eq!(&back, &expected);

        let (mut forth, mut from) = (Vec::new(), Begin::After(Cursor::new()));
        loop {
            let told = look(&paths, &ask(from, filter.clone())).expect("readable");
            forth.extend(told.lines.iter().map(|line| line.text.clone()));
            if told.done { break }
            from = Begin::After(as_cursor(&told.bottom));
        }
        prop_assert_eq!(&forth, &expected);
    }

    #[test]
    fn a_text_is_found_as_the_standard_library_finds_it(line in "[aAbB ]{0,12}", text in "[ab]{0,4}") {
        let found = contains_ignoring_case(line.as_bytes(), text.as_bytes());
        prop_assert_eq!(found, line.to_lowercase().contains(&text));
    }
}
