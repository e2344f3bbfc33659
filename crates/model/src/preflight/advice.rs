//! What programs should be told about a machine that is not well: settings for NCCL and UCX.
//!
//! *Invariant:* each setting avoids a path that a finding has shown to be broken; none makes a well
//! path faster.

use serde::{Deserialize, Serialize};

use super::{Finding, Severity};
use crate::plan::Advice;

/// Who is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Audience {
    /// Programs with NCCL.
    Nccl,
    /// Programs with UCX.
    Ucx,
    /// vLLM: NCCL's, and its own.
    Vllm,
}

/// Settings that follow from findings, each once.
pub fn advice(findings: &[Finding], audience: Audience) -> Vec<Advice> {
    let mut all: Vec<Advice> = Vec::new();
    for finding in findings {
        for (name, value, reason) in settings(finding, audience) {
            if !all.iter().any(|one| one.name == name) {
                let (name, value) = (name.to_owned(), value);
                let reason = reason.to_owned();
                all.push(Advice { name, value, id: finding.id.clone(), reason });
            }
        }
    }
    all
}

fn settings(finding: &Finding, audience: Audience) -> Vec<(&'static str, String, &'static str)> {
    let nccl = audience != Audience::Ucx;
    let bad = finding.severity >= Severity::Warning;
    match finding.id.as_str() {
        "iommu" | "acs" if bad && nccl => vec![(
            "NCCL_P2P_LEVEL",
            "NVL".to_owned(),
            "peers over PCIe go through the CPU here; those over NVLink stay",
        )],
        // UCX has no switch for PCIe alone: with wrong bytes at stake, none is the safe one.
        "iommu" if finding.severity == Severity::Error => {
            let reason = "peers over PCIe go through an IOMMU, which may change bytes";
            vec![("UCX_TLS", "^cuda_ipc".to_owned(), reason)]
        }
        "fabric-state" | "nvlink-peers" if bad && nccl => vec![(
            "NCCL_NVLS_ENABLE",
            "0".to_owned(),
            "the NVLink fabric is not whole, and NVSwitches cannot reduce",
        )],
        "gpudirect-rdma" | "bar1" if bad => match nccl {
            true => vec![(
                "NCCL_NET_GDR_LEVEL",
                "LOC".to_owned(),
                "adapters cannot read GPU memory here",
            )],
            false => vec![(
                "UCX_IB_GPU_DIRECT_RDMA",
                "n".to_owned(),
                "adapters cannot read GPU memory here",
            )],
        },
        "interface" if finding.severity >= Severity::Note => {
            let hardware = finding.text.split(" comes before ").nth(1);
            let hardware = hardware.and_then(|rest| rest.split(',').next());
            let Some(hardware) = hardware else { return Vec::new() };
            let reason = "the first interface is virtual";
            match audience {
                Audience::Ucx => Vec::new(),
                Audience::Nccl => vec![("NCCL_SOCKET_IFNAME", format!("={hardware}"), reason)],
                Audience::Vllm => vec![
                    ("NCCL_SOCKET_IFNAME", format!("={hardware}"), reason),
                    ("GLOO_SOCKET_IFNAME", hardware.to_owned(), reason),
                ],
            }
        }
        _ => Vec::new(),
    }
}
