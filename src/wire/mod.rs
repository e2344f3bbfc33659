//! Messages between processes, as values with an encoding.
//!
//! Sends nothing; the engines and the supervisor do.
//!
//! # The native engine's sockets
//!
//! The scheduler listens on `RUN/scheduler.sock`, each worker on `RUN/NAME.sock`; both are of mode
//! 0600. A *frame* is its length in four bytes, little-endian, and that many bytes of a
//! [postcard](https://postcard.jamesmunns.com/wire-format) value; nothing may be left over.
//!
//! | step | from | value | limit |
//! |---|---|---|---|
//! | 1 | listener | [`native::Challenge`]: version, nonce | 256 bytes |
//! | 2 | connecting side | [`native::Answer`]: nonce, proof | 256 bytes |
//! | 3 | listener | [`native::Welcome`]: proof | 256 bytes |
//! | then | worker → scheduler | [`native::ToScheduler`] | 8 MiB |
//! | | client → scheduler | the same: `List`, `Measure`, `Ask` | 8 MiB, 65,536 requests |
//! | | scheduler → worker, client | [`native::ToWorker`], [`native::ToClient`] | 8 MiB |
//! | | client, worker ↔ worker | [`tasks::Bulk`], [`tasks::BulkReply`], bare bytes | 8 MiB |
//!
//! A proof is a keyed hash over both nonces under the cluster's secret. Postcard writes an enum's
//! variant by its position, so a variant or a field that is added, removed or moved makes another
//! [`native::VERSION`]; a side of another version is refused, and named. A frame that is too long,
//! malformed, or not the expected value ends its connection, with the reason in the log. Who does
//! not read its answers is not heard any more, and in the end dropped.
//!
//! Between workers, [`peer`] says what travels over UCX; [`output`] carries what the ranks of a run
//! write. `scripts/fuzz.sh` feeds all decoders.
//!
//! *Invariant:* no input makes a decoder panic or allocate more than its input's size warrants.

pub mod native;
pub mod output;
pub mod peer;
pub mod secret;
pub mod status;
pub mod tasks;
