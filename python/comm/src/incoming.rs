//! A message on its way in, from its announcement to its last byte:
//!
//! ```text
//!     announced ─┬───────────────────────────► whole    nothing of it waits at the sender
//!                ├──────────────► copying ───► whole    this process copies what waits
//!                └─► granted ─┬─► copying ───► whole    the sender writes to memory of this process
//!                             └──────────────► whole    first; what it may not write is copied, or
//!                                                       follows on the socket
//! ```
//!
//! Decides; does not read, copy or send.
//!
//! *Invariant:* each frame that waits at the sender comes once: it is granted, copied or streamed.

use std::collections::VecDeque;
use std::sync::Arc;

use cuda_cluster_data::memory::Block;
use cuda_cluster_data::memory::arena::Arena;

use crate::reader::{Message, Span};
use crate::wire::Grant;

/// What is to be done for a message.
#[derive(Debug)]
pub(crate) enum Incoming {
    /// Nothing: it is whole.
    Whole(Message),
    /// What waits is to be copied from the sender's memory.
    Copying(Message),
    /// The sender is to be told what it may write.
    Granted(Grants),
}

/// A message of which the sender writes a part.
#[derive(Debug)]
pub(crate) struct Grants {
    pub(crate) message: Message,
    /// For each frame that waits, where the sender writes it, if it may.
    pub(crate) grants: Vec<Grant>,
    /// Where all of them are.
    pub(crate) arena: Option<Arc<Arena>>,
    /// What follows on the socket after that.
    pub(crate) missing: VecDeque<Span>,
    /// Bytes that the sender writes.
    pub(crate) mapped: usize,
}

/// How frames that wait at the sender may come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Means {
    /// This process may copy them.
    pub(crate) copies: bool,
    /// The sender may write them to memory of this process.
    pub(crate) maps: bool,
}

impl Incoming {
    /// All bytes of a message have come but those that wait at the sender. `least` tells from how
    /// many bytes on they are better written than copied, if it is known.
    pub(crate) fn announced(
        message: Message,
        means: Means,
        least: impl FnOnce(usize) -> Option<usize>,
    ) -> Self {
        if message.copies.is_empty() {
            return Self::Whole(message);
        }
        let waiting = || message.copies.iter().map(|(at, _)| &message.blocks[*at]);
        let arena = waiting().find_map(|block| block.shared()).map(|(arena, _)| Arc::clone(arena));
        let is_granted = means.maps
            && (!means.copies || {
                let whole = message.waiting();
                let shared = waiting().filter(|block| place(block, arena.as_ref()).is_some());
                let shared: usize = shared.map(|block| block.len()).sum();
                least(whole).is_some_and(|least| shared >= least && shared >= whole / 2)
            });
        if is_granted {
            Self::Granted(Grants::new(message, means, arena))
        } else {
            Self::Copying(message)
        }
    }

    /// The sender has written, and streamed, its part of a message.
    pub(crate) fn written(message: Message) -> Self {
        if message.copies.is_empty() { Self::Whole(message) } else { Self::Copying(message) }
    }
}

impl Grants {
    fn new(mut message: Message, means: Means, arena: Option<Arc<Arena>>) -> Self {
        let (mut grants, mut missing, mut mapped) = (Vec::new(), VecDeque::new(), 0);
        for (at, address) in std::mem::take(&mut message.copies) {
            let block = &mut message.blocks[at];
            let place = place(block, arena.as_ref());
            grants.push(place);
            if place.is_some() {
                block.lend(true);
                mapped += block.len();
            } else if means.copies {
                message.copies.push((at, address));
            } else {
                missing.push_back(Span { block: at, start: 0, len: block.len() });
            }
        }
        Self { message, grants, arena, missing, mapped }
    }
}

/// Where a block lies in this arena, if it does.
fn place(block: &Block, arena: Option<&Arc<Arena>>) -> Grant {
    let (its, place) = block.shared()?;
    arena.is_some_and(|arena| Arc::ptr_eq(its, arena)).then_some(place as u64)
}

#[cfg(test)]
mod tests {
    use cuda_cluster_data::memory::{Limits, Pool};

    use super::*;

    const MIB: usize = 1 << 20;
    const BOTH: Means = Means { copies: true, maps: true };
    const MAPPED: Means = Means { copies: false, maps: true };
    const COPIED: Means = Means { copies: true, maps: false };

    /// A message with one frame that has come, and others of a MiB that wait: shared, or not.
    fn message(waiting: &[bool]) -> Message {
        let pool = Pool::new(&Limits::new(64 * MIB));
        let mut message = Message { number: 7, ..Message::default() };
        message.blocks.push(pool.take(10).unwrap());
        for (shared, at) in waiting.iter().zip(1..) {
            let block = if *shared { pool.take_shared(MIB) } else { pool.take(MIB) };
            message.blocks.push(block.unwrap());
            message.copies.push((at, at as u64 * 4096));
        }
        message
    }

    fn announced(waiting: &[bool], means: Means, least: Option<usize>) -> Incoming {
        Incoming::announced(message(waiting), means, |_| least)
    }

    #[test]
    fn what_does_not_wait_is_whole_and_what_cannot_be_written_is_copied() {
        assert!(matches!(announced(&[], BOTH, Some(0)), Incoming::Whole(_)));
        let copied = announced(&[true, false], COPIED, Some(0));
        let Incoming::Copying(message) = copied else { panic!("{copied:?}") };
        assert_eq!(message.copies, [(1, 4096), (2, 8192)]);
        assert!(matches!(Incoming::written(message), Incoming::Copying(_)));
        assert!(matches!(Incoming::written(Message::default()), Incoming::Whole(_)));
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri knows no memory that is shared")]
    fn a_sender_writes_what_is_shared_where_that_pays_and_is_most_of_the_message() {
        let is_granted = |waiting: &[bool], least| {
            matches!(announced(waiting, BOTH, least), Incoming::Granted(_))
        };
        assert!(is_granted(&[true, false], Some(MIB)));
        assert!(!is_granted(&[true, false], Some(MIB + 1)), "too little is shared");
        assert!(!is_granted(&[true, false, false], Some(0)), "less than half");
        assert!(!is_granted(&[true], None), "it never pays, or that is not known");
        let Incoming::Granted(granted) = announced(&[false, true, true], BOTH, Some(0)) else {
            panic!("most of it is shared");
        };
        assert!(granted.grants[0].is_none() && granted.grants[1..].iter().all(Option::is_some));
        assert_eq!(granted.message.copies, [(1, 4096)], "the rest is copied after that");
        assert!(granted.missing.is_empty() && granted.arena.is_some());
        assert_eq!(granted.mapped, 2 * MIB);
        assert!(matches!(Incoming::written(granted.message), Incoming::Copying(_)));
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri knows no memory that is shared")]
    fn where_nothing_can_be_copied_what_is_not_shared_is_streamed() {
        let Incoming::Granted(granted) = announced(&[true, false], MAPPED, None) else {
            panic!("there is no other way");
        };
        assert_eq!(granted.missing, [Span { block: 2, start: 0, len: MIB }]);
        assert_eq!((granted.grants[1], granted.mapped), (None, MIB));
        assert!(matches!(Incoming::written(granted.message), Incoming::Whole(_)));
        let Incoming::Granted(granted) = announced(&[false], MAPPED, None) else {
            panic!("it asks for the stream");
        };
        assert_eq!((granted.grants.len(), granted.missing.len()), (1, 1));
        assert!(granted.arena.is_none());
    }
}
