//! What NVML does not answer: which gaps are usual, which are noted, and which end the query.
//!
//! *Invariant:* a missing answer is either usual for some GPUs or drivers, or a note.

use nvml_wrapper::error::NvmlError;

use cuda_cluster_model::topology::Note;

/// Queries about one GPU, and the notes that they produce.
pub(super) struct Questions<'a> {
    about: String,
    notes: &'a mut Vec<Note>,
}

impl<'a> Questions<'a> {
    /// Queries about a device of this name.
    pub(super) fn about(about: String, notes: &'a mut Vec<Note>) -> Self {
        Self { about, notes }
    }

    /// A property of every GPU; a missing answer is noted.
    ///
    /// # Errors
    /// If the GPU is lost, so that further queries are pointless.
    pub(super) fn must<T>(
        &mut self,
        what: &str,
        told: Result<T, NvmlError>,
    ) -> Result<Option<T>, NvmlError> {
        match told {
            Ok(fact) => Ok(Some(fact)),
            Err(error) if is_lost(&error) => Err(error),
            Err(error) => {
                self.note(format!("NVML does not tell its {what}: {error}"));
                Ok(None)
            }
        }
    }

    /// A property that some GPUs don't have, or some drivers don't report.
    ///
    /// # Errors
    /// As [`Questions::must`].
    pub(super) fn may<T>(
        &mut self,
        what: &str,
        told: Result<T, NvmlError>,
    ) -> Result<Option<T>, NvmlError> {
        match told {
            Err(
                NvmlError::NotSupported
                | NvmlError::InvalidArg
                | NvmlError::NotFound
                | NvmlError::FunctionNotFound
                | NvmlError::FailedToLoadSymbol(_),
            ) => Ok(None),
            told => self.must(what, told),
        }
    }

    pub(super) fn note(&mut self, text: String) {
        self.notes.push(Note::new(self.about.clone(), text));
    }
}

fn is_lost(error: &NvmlError) -> bool {
    matches!(error, NvmlError::GpuLost | NvmlError::ResetRequired)
}
