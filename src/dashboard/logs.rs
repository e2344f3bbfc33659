//! What a page is shown of a process's log: its last lines, then what is written.
//!
//! *Invariant:* a message is bounded, whatever the program writes; secrets are masked.

use std::convert::Infallible;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::response::sse::Event;
use serde::Serialize;
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;

use crate::os::log_file::{Line, LogReader, Selection};
use crate::text::masked_line;

/// Most lines of a message.
const LINES: usize = 1000;

/// Most bytes of a message's texts.
const BYTES: usize = 256 << 10;

/// Most bytes of a line.
const LINE_BYTES: usize = 4 << 10;

/// Time between two looks at the log.
const EVERY: Duration = Duration::from_secs(1);

/// A line of a log as a page shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Shown {
    at: String,
    text: String,
}

impl Shown {
    fn of(line: &Line) -> Self {
        let at = humantime::format_rfc3339_millis(line.at).to_string();
        // Cut before it is masked, which takes time: a secret comes after its name.
        let kept = &line.text[..line.text.len().min(LINE_BYTES)];
        let more = line.text.len() - kept.len();
        let mut text = masked_line(&String::from_utf8_lossy(kept));
        if more > 0 {
            text.push_str(&format!("… ({more} more bytes)"));
        }
        Self { at, text }
    }
}

/// A message to a page.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
struct News {
    /// Whether it is the first: what the page shows of the log is void.
    begins: bool,
    /// Number of lines before these that are not shown.
    left_out: usize,
    lines: Vec<Shown>,
    /// The line that has no end yet; it replaces the one told before.
    unfinished: Option<Shown>,
}

impl News {
    /// The last of these lines, as many as a message may have.
    fn of(lines: &[Line], unfinished: Option<&Line>) -> Self {
        let mut bytes = 0;
        let kept = lines.iter().rev().take(LINES).map(Shown::of).take_while(|line| {
            bytes += line.text.len();
            bytes <= BYTES
        });
        let mut kept: Vec<Shown> = kept.collect();
        kept.reverse();
        let left_out = lines.len() - kept.len();
        Self { begins: false, left_out, lines: kept, unfinished: unfinished.map(Shown::of) }
    }
}

/// Reads a log for one page.
struct Follower {
    reader: LogReader,
    /// Length of the unfinished line that was told last.
    told: usize,
}

impl Follower {
    fn open(path: &Path) -> io::Result<(Self, News)> {
        let wanted = Selection { tail: Some(LINES), since: None };
        let (reader, lines) = LogReader::open(path, wanted)?;
        let news = News { begins: true, ..News::of(&lines, reader.unfinished().as_ref()) };
        let told = reader.unfinished_bytes();
        Ok((Self { reader, told }, news))
    }

    /// What was written since the last call; `None` if nothing was.
    fn next(&mut self) -> io::Result<Option<News>> {
        let lines = self.reader.appended()?;
        let unfinished = self.reader.unfinished_bytes();
        if lines.is_empty() && unfinished == self.told {
            return Ok(None);
        }
        self.told = unfinished;
        Ok(Some(News::of(&lines, self.reader.unfinished().as_ref())))
    }
}

/// The last lines of a log, then what is written, while somebody reads this.
pub(super) fn stream(path: PathBuf) -> impl Stream<Item = Result<Event, Infallible>> {
    let (sender, messages) = mpsc::channel(1);
    tokio::spawn(async move {
        let opened = tokio::task::spawn_blocking(move || Follower::open(&path)).await;
        let Ok(Ok((mut follower, first))) = opened else { return };
        let mut news = Some(first);
        loop {
            if let Some(news) = news.take()
                && sender.send(news).await.is_err()
            {
                return;
            }
            tokio::select! {
                () = tokio::time::sleep(EVERY) => {}
                () = sender.closed() => return,
            }
            let read = move || {
                let next = follower.next();
                (follower, next)
            };
            // The browser asks again where the log can't be read.
            let Ok((reader, Ok(next))) = tokio::task::spawn_blocking(read).await else { return };
            (follower, news) = (reader, next);
        }
    });
    let event = |news: News| {
        // Values of ours have only keys that are texts.
        let text = serde_json::to_string(&news).unwrap_or_default();
        Ok(Event::default().event("log").data(text))
    };
    tokio_stream::StreamExt::map(ReceiverStream::new(messages), event)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::Write;
    use std::time::SystemTime;

    fn line(text: impl Into<Vec<u8>>) -> Line {
        Line { at: SystemTime::UNIX_EPOCH, text: text.into() }
    }

    #[test]
    fn a_long_line_is_cut_and_says_how_much_is_missing() {
        let text = [b"API_TOKEN=".to_vec(), vec![b'x'; 10 << 20]].concat();
        let shown = Shown::of(&line(text)).text;
        assert_eq!(shown, format!("API_TOKEN=***… ({} more bytes)", (10 << 20) + 10 - LINE_BYTES));
    }

    proptest! {
        #[test]
        fn a_message_is_bounded_and_ends_with_the_last_line(
            lengths in proptest::collection::vec(0usize..20_000, 0..1500),
        ) {
            let lines: Vec<Line> = lengths.iter().map(|length| line(vec![b'x'; *length])).collect();
            let news = News::of(&lines, lines.first());
            let bytes: usize = news.lines.iter().map(|line| line.text.len()).sum();
            prop_assert!(bytes <= BYTES && news.lines.len() <= LINES);
            prop_assert_eq!(news.lines.len() + news.left_out, lines.len());
            prop_assert_eq!(news.lines.last().cloned(), lines.last().map(Shown::of));
        }
    }

    #[test]
    fn only_what_is_new_is_told() {
        let folder = tempfile::tempdir().expect("a directory");
        let path = folder.path().join("gpu0.log");
        let stamp = "2026-01-31T23:59:59.000Z ";
        std::fs::write(&path, format!("{stamp}one\n{stamp}tw")).expect("written");
        let texts = |news: &News| {
            let lines = news.lines.iter().chain(&news.unfinished);
            lines.map(|line| line.text.clone()).collect::<Vec<_>>()
        };
        let (mut follower, first) = Follower::open(&path).expect("readable");
        assert!(first.begins);
        assert_eq!(texts(&first), ["one", "tw"]);
        assert_eq!(follower.next().expect("readable"), None);
        let mut file = std::fs::OpenOptions::new().append(true).open(&path).expect("a file");
        write!(file, "o\n{stamp}three\n").expect("written");
        let news = follower.next().expect("readable").expect("news");
        assert_eq!(
            (news.begins, texts(&news)),
            (false, vec!["two".to_owned(), "three".to_owned()])
        );
        assert_eq!(follower.next().expect("readable"), None);
    }
}
