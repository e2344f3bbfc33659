//! Waits until a dead process's GPU is free, and asks what the GPU has to say about the death.
//!
//! Knows no NVML: whoever starts the supervisor brings a [`GpuWatch`].
//!
//! *Invariant:* no wait is longer than it was allowed to be, and one that ends in vain names a
//! holder.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use serde::{Deserialize, Serialize};

use super::ProcessGpu;
use super::core::GpuFinding;
use super::record::GpuError;
use crate::units::HumanBytes;

/// Looks at GPUs. Its calls may block for some milliseconds; they run on blocking threads.
pub trait GpuWatch: Send + Sync + fmt::Debug {
    /// The processes that hold memory of a GPU.
    ///
    /// # Errors
    /// With a sentence, if it cannot be read; the GPU then counts as free.
    fn holders(&self, gpu: &ProcessGpu) -> Result<Vec<GpuHolder>, String>;

    /// Why a GPU cannot be used any more, like `GPU 3 has fallen off the bus (Xid 79)`.
    fn lost(&self, gpu: &ProcessGpu) -> Option<String> {
        let _ = gpu;
        None
    }

    /// Errors that the driver reported for a GPU since a time (Xid events).
    fn errors_since(&self, gpu: &ProcessGpu, since: SystemTime) -> Vec<GpuError> {
        let _ = (gpu, since);
        Vec::new()
    }
}

/// A process that holds memory of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuHolder {
    /// Its process id.
    pub pid: u32,
    /// Its name, where known.
    pub name: Option<String>,
    /// How much, where known.
    pub bytes: Option<u64>,
}

impl fmt::Display for GpuHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {}", self.pid)?;
        if let Some(name) = &self.name {
            write!(f, " ({name})")?;
        }
        if let Some(bytes) = self.bytes {
            write!(f, " with {}", HumanBytes(bytes))?;
        }
        Ok(())
    }
}

/// First time between two looks; doubles up to ten times as long.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Waits until nobody holds memory of `gpu` but `others`, who did so before or live rightly.
pub(super) async fn await_free(
    watch: Option<Arc<dyn GpuWatch>>,
    gpu: ProcessGpu,
    others: BTreeSet<u32>,
    within: Duration,
) -> GpuFinding {
    let Some(watch) = watch else { return GpuFinding::Free };
    let begin = Instant::now();
    let mut pause = LOOK_AGAIN;
    loop {
        let (looker, looked_at) = (Arc::clone(&watch), gpu.clone());
        let look = move || (looker.lost(&looked_at), looker.holders(&looked_at));
        // A look that panics has found nothing.
        let Ok((lost, holders)) = tokio::task::spawn_blocking(look).await else {
            return GpuFinding::Free;
        };
        if let Some(reason) = lost {
            return GpuFinding::Lost(reason);
        }
        let holder =
            holders.unwrap_or_default().into_iter().find(|holder| !others.contains(&holder.pid));
        let Some(holder) = holder else { return GpuFinding::Free };
        if begin.elapsed() >= within {
            return GpuFinding::Held(format!(
                "GPU {}'s memory is still held by {holder} after {}",
                gpu.index,
                crate::units::Span(within)
            ));
        }
        tokio::time::sleep(pause.min(within.saturating_sub(begin.elapsed()))).await;
        pause = (pause * 2).min(LOOK_AGAIN * 10);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    /// Says one answer after the other, and the last for ever.
    #[derive(Debug)]
    struct Script(Mutex<Vec<Vec<u32>>>);

    impl GpuWatch for Script {
        fn holders(&self, _: &ProcessGpu) -> Result<Vec<GpuHolder>, String> {
            let mut answers = self.0.lock().expect("not poisoned");
            let answer = if answers.len() > 1 { answers.remove(0) } else { answers[0].clone() };
            let holder = |pid| GpuHolder { pid, name: Some("python".into()), bytes: Some(1 << 30) };
            Ok(answer.into_iter().map(holder).collect())
        }
    }

    async fn find(answers: Vec<Vec<u32>>, others: &[u32]) -> GpuFinding {
        let watch = Some(Arc::new(Script(Mutex::new(answers))) as Arc<dyn GpuWatch>);
        let gpu = ProcessGpu { index: 3, uuid: None, pci: None };
        let others = others.iter().copied().collect();
        await_free(watch, gpu, others, Duration::from_millis(150)).await
    }

    #[tokio::test]
    async fn it_waits_for_the_dead_and_not_for_others() {
        assert_eq!(find(vec![vec![7, 9], vec![7, 9], vec![7]], &[7]).await, GpuFinding::Free);
    }

    #[tokio::test]
    async fn a_wait_in_vain_names_the_holder() {
        let expected =
            "GPU 3's memory is still held by process 9 (python) with 1.0 GiB after 150ms";
        assert_eq!(find(vec![vec![9]], &[]).await, GpuFinding::Held(expected.to_owned()));
    }
}
