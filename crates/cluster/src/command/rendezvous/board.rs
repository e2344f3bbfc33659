//! What ranks tell each other before they know each other: values by name, and meetings.
//!
//! Pure: who asks is a number, and what is answered comes back with the numbers of those that have
//! waited for it. Knows no language and no connection.
//!
//! *Invariant:* a client has at most one open question; a meeting ends when all ranks are there.

use std::collections::BTreeMap;

use cuda_cluster_wire::ranks::{Answer, Ask, Wait};

/// Most bytes of names and values, all told.
const ROOM: usize = 64 << 20;

/// A connection.
pub(super) type Client = u64;

/// The answers that are due.
pub(super) type Due = Vec<(Client, Answer)>;

/// The values, and those that wait.
#[derive(Debug)]
pub(super) struct Board {
    ranks: usize,
    values: BTreeMap<String, Vec<u8>>,
    bytes: usize,
    waiting: BTreeMap<Client, Awaited>,
}

#[derive(Debug, PartialEq, Eq)]
enum Awaited {
    Value(String),
    Meeting(&'static str),
}

impl Board {
    pub(super) fn new(ranks: usize) -> Self {
        Self { ranks, values: BTreeMap::new(), bytes: 0, waiting: BTreeMap::new() }
    }

    /// Takes a question; returns what is answered by it.
    pub(super) fn ask(&mut self, client: Client, ask: Ask) -> Due {
        match ask {
            Ask::Put { name, value } => self.put(client, name, value),
            Ask::Get { name, wait } => match (self.values.get(&name), wait) {
                (Some(value), _) => vec![(client, Answer::Value(value.clone()))],
                (None, Wait::No) => vec![(client, Answer::Missing)],
                (None, Wait::For(_) | Wait::Forever) => {
                    self.waiting.insert(client, Awaited::Value(name));
                    Due::new()
                }
            },
            Ask::Meet { name } => {
                self.waiting.insert(client, Awaited::Meeting(name));
                self.meet(name)
            }
        }
    }

    /// Forgets a client that has left, or waits no longer.
    pub(super) fn forget(&mut self, client: Client) {
        self.waiting.remove(&client);
    }

    fn put(&mut self, client: Client, name: String, value: Vec<u8>) -> Due {
        let before = self.values.get(&name).map_or(0, |value| name.len() + value.len());
        let bytes = self.bytes - before + name.len() + value.len();
        if bytes > ROOM {
            return vec![(client, Answer::Refused("no room for more values"))];
        }
        self.bytes = bytes;
        let mut due = vec![(client, Answer::Done)];
        for client in self.let_go(&Awaited::Value(name.clone())) {
            due.push((client, Answer::Value(value.clone())));
        }
        self.values.insert(name, value);
        due
    }

    /// Ends a meeting if all ranks are there.
    fn meet(&mut self, name: &'static str) -> Due {
        let there = self.waiting.values().filter(|one| **one == Awaited::Meeting(name)).count();
        if there < self.ranks {
            return Due::new();
        }
        let came = self.let_go(&Awaited::Meeting(name));
        came.into_iter().map(|client| (client, Answer::Done)).collect()
    }

    fn let_go(&mut self, awaited: &Awaited) -> Vec<Client> {
        let gone = self.waiting.iter().filter(|(_, one)| *one == awaited);
        let gone: Vec<Client> = gone.map(|(client, _)| *client).collect();
        self.waiting.retain(|_, one| one != awaited);
        gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(name: &str, value: &[u8]) -> Ask {
        Ask::Put { name: name.to_owned(), value: value.to_vec() }
    }

    fn get(name: &str, wait: Wait) -> Ask {
        Ask::Get { name: name.to_owned(), wait }
    }

    #[test]
    fn a_value_reaches_those_that_wait_and_those_that_come() {
        let mut board = Board::new(3);
        assert_eq!(board.ask(1, get("a", Wait::No)), [(1, Answer::Missing)]);
        assert_eq!(board.ask(1, get("a", Wait::Forever)), []);
        assert_eq!(board.ask(2, get("b", Wait::Forever)), []);
        let value = Answer::Value(b"x".to_vec());
        assert_eq!(board.ask(0, put("a", b"x")), [(0, Answer::Done), (1, value.clone())]);
        assert_eq!(board.ask(0, get("a", Wait::No)), [(0, value)]);
    }

    #[test]
    fn a_meeting_ends_when_all_are_there_and_can_begin_again() {
        let mut board = Board::new(2);
        for _ in 0..2 {
            assert_eq!(board.ask(7, Ask::Meet { name: "barrier" }), []);
            assert_eq!(board.ask(8, Ask::Meet { name: "sync" }), []);
            board.forget(8);
            let all = [(7, Answer::Done), (9, Answer::Done)];
            assert_eq!(board.ask(9, Ask::Meet { name: "barrier" }), all);
        }
    }

    #[test]
    fn one_that_left_is_not_waited_for_twice() {
        let mut board = Board::new(2);
        board.ask(1, Ask::Meet { name: "barrier" });
        board.forget(1);
        assert_eq!(board.ask(2, Ask::Meet { name: "barrier" }), [], "one of two has gone");
    }

    #[test]
    fn room_has_an_end_and_a_value_can_be_replaced() {
        let mut board = Board::new(1);
        let half = vec![0; ROOM / 2];
        assert_eq!(board.ask(0, put("a", &half)), [(0, Answer::Done)]);
        assert_eq!(board.ask(0, put("a", &half)), [(0, Answer::Done)]);
        assert!(matches!(board.ask(0, put("b", &half))[0].1, Answer::Refused(_)));
        assert_eq!(board.ask(0, put("a", b"")), [(0, Answer::Done)]);
        assert_eq!(board.ask(0, put("b", &half)), [(0, Answer::Done)]);
    }
}
