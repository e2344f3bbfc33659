//! Messages between processes, as values with an encoding.
//!
//! Does not send them; the engines and the supervisor do.
//!
//! # The native engine's sockets
//!
//! The scheduler listens on `RUN/scheduler.sock`, each worker on `RUN/NAME.sock`; both are of mode
//! 0600. A *frame* is its length in four bytes, little-endian, and that many bytes of a
//! [postcard](https://postcard.jamesmunns.com/wire-format) value; nothing may be left over.
//!
//! | step | from | value | limit |
//! |---|---|---|---|
//! | 1 | listener | [`greeting::Challenge`]: version, nonce | 256 bytes |
//! | 2 | connecting side | [`greeting::Answer`]: role, nonce, proof | 256 bytes |
//! | 3 | listener | [`greeting::Welcome`]: proof | 256 bytes |
//! | then | worker → scheduler | [`native::Registration`] | 8 MiB |
//! | | and from then on | [`native::FromWorker`] | 8 MiB |
//! | | client → scheduler | [`native::FromClient`] | 8 MiB, 65,536 requests |
//! | | scheduler → worker, client | [`native::ToWorker`], [`native::ToClient`] | 8 MiB |
//! | | client, worker ↔ worker | [`tasks::Bulk`], [`tasks::BulkReply`], bare bytes | 8 MiB |
//! | | worker ↔ worker | [`tasks::FromViewer`], [`tasks::ToViewer`], descriptors | 8 MiB |
//!
//! A proof is a keyed hash over the role and both nonces under the cluster's secret. The scheduler
//! accepts workers and clients, a worker's socket accepts bulk connections and viewers; any other
//! [`greeting::Role`] is refused. Postcard encodes an enum's variant by its position, so adding,
//! removing or moving a variant or a field requires a new [`greeting::VERSION`]; a side with
//! another version is refused, and the error names it. A frame that is too long, malformed, or not
//! a message of the connection's role ends its connection, and the log has the reason. The
//! scheduler stops reading from a connection that does not read its answers, and eventually drops
//! it.
//!
//! [`peer`] defines the messages between workers over UCX; [`output`] carries what the ranks of a
//! run write, [`ranks`] what they ask in other launchers' languages. `scripts/fuzz.sh` fuzzes all
//! decoders.
//!
//! *Invariant:* no input makes a decoder panic or allocate more than its input's size warrants.

#![allow(missing_docs, reason = "a part of the house; what users see is documented there")]

mod exact;
pub mod frame;
pub mod greeting;
pub mod history;
pub mod links;
pub mod native;
pub mod numbers;
pub mod output;
pub mod peer;
pub mod process;
pub mod ranks;
pub mod secret;
pub mod status;
pub mod tasks;
pub mod value;
