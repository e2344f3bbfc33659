//! Settings that preflight advises, for programs of the command engine.
//!
//! Our own engines take other ways by themselves.
//!
//! *Invariant:* what the user has set, in the environment or the spec, is left as it is.

use super::variables::{Situation, Variables};
use crate::spec::EngineKind;

/// Sets what is advised.
pub(super) fn heed(situation: &Situation<'_>, variables: &mut Variables) {
    if situation.engine != EngineKind::Command || !situation.gpus {
        return;
    }
    let of_spec = |name: &str| {
        let worker = situation.spec.worker.env.as_ref();
        let ucx = situation.spec.ucx.env.as_ref();
        worker.into_iter().chain(ucx).any(|env| env.contains_key(name))
    };
    for advice in &situation.caller.advice {
        let name = advice.name.as_str();
        let set = variables.env.contains_key(name)
            || situation.caller.variables.contains_key(name)
            || of_spec(name);
        if !set {
            let reason = match advice.id.as_str() {
                "" => advice.reason.clone(),
                id => format!("{} ('doctor --explain {id}')", advice.reason),
            };
            variables.set(name, advice.value.clone(), reason);
        }
    }
}
