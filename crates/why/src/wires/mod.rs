//! Which wire the bytes of a job took, and why not the fast one: from the lines that NCCL and UCX
//! write, and from the answers of NCCL's RAS.
//!
//! Finds no lines itself: it is given text.
//!
//! *Invariant:* any text has a reading, and the channels do not depend on the order in which the
//! lines of different ranks came.

mod cause;
mod channel;
mod judge;
mod lines;
mod nccl;
pub mod ras;
mod signs;
mod ucx;

use serde::{Deserialize, Serialize};

pub use cause::{Cause, Found};
pub use channel::{Channel, Who, grouped};

/// What was read.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Wires {
    /// Who sends to whom by what, in order and each once.
    pub channels: Vec<Channel>,
    /// What is wrong, the weightiest first; each cause once.
    pub causes: Vec<Found>,
    /// What is not wrong, but good to know.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// What RAS has answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ras: Option<ras::Status>,
    /// Lines that say something that we know.
    pub understood: usize,
    /// Lines of NCCL or UCX that say something that we don't know.
    pub not_understood: usize,
}

impl Wires {
    /// Whether there was any line of NCCL, RAS or UCX.
    pub fn any(&self) -> bool {
        self.understood > 0 || self.not_understood > 0 || self.ras.is_some()
    }
}

/// Reads the lines of one job, of any number of its processes.
pub fn read(text: &str) -> Wires {
    let lines = lines::lines(text);
    let mut job = judge::Job::default();
    let (mut understood, mut not_understood) = (0, 0);
    for line in &lines {
        for record in lines::records(line) {
            let sign = signs::sign(&record);
            let known = [
                sign.is_some(),
                job.nccl.see(&record),
                job.ucx.see(&record),
                lines::is_usual(&record),
            ];
            if let Some(cause) = sign.or_else(|| job.ucx.failed(&record)) {
                job.found(cause, record.whole);
            }
            match known.contains(&true) {
                true => understood += 1,
                false if record.speaks() => not_understood += 1,
                false => {}
            }
        }
    }
    job.ras = ras::parse(text);
    let channels = job.channels();
    let (causes, notes) = (job.causes(&channels), job.notes(&channels));
    Wires { channels, causes, notes, ras: job.ras, understood, not_understood }
}
