//! Waits until a dead process's GPU is free, and asks for the GPU's errors.
//!
//! Does not use NVML: the starter of the supervisor provides a [`GpuWatch`].
//!
//! *Invariant:* waits are limited, and one that times out names a process that uses the GPU.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use serde::{Deserialize, Serialize};

use super::ProcessGpu;
use super::core::GpuFinding;
use super::record::GpuError;
use cuda_cluster_model::units::HumanBytes;

/// Queries GPUs. Calls may block for some milliseconds; they run on blocking threads.
pub trait GpuWatch: Send + Sync + fmt::Debug {
    /// The processes that use memory of a GPU.
    ///
    /// # Errors
    /// With a message, if they can't be determined; the GPU then counts as free.
    fn holders(&self, gpu: &ProcessGpu) -> Result<Vec<GpuHolder>, String>;

    /// Why a GPU can't be used any more, such as `GPU 3 has fallen off the bus (Xid 79)`.
    fn lost(&self, gpu: &ProcessGpu) -> Option<String> {
        let _ = gpu;
        None
    }

    /// How busy a GPU was, in percent: the mean and the highest of what was read after a moment;
    /// `None` if nothing was. Does not block and reads nothing.
    fn busy_since(&self, gpu: &ProcessGpu, since: Instant) -> Option<(f64, f64)> {
        let _ = (gpu, since);
        None
    }

    /// Errors that the driver has reported for a GPU since a time (Xid events).
    fn errors_since(&self, gpu: &ProcessGpu, since: SystemTime) -> Vec<GpuError> {
        let _ = (gpu, since);
        Vec::new()
    }
}

/// A process that uses memory of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuHolder {
    /// Its process id.
    pub pid: u32,
    /// Its name, if known.
    pub name: Option<String>,
    /// The amount, if known.
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

/// Initial time between two queries; grows up to ten times.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Waits until no process uses memory of `gpu` except `others`, which did so before or may do so.
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
        // A query that panics has found nothing.
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
                cuda_cluster_model::units::Span(within)
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

    /// Returns one answer after the other, and then repeats the last.
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
