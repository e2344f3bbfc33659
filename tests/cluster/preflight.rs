//! What preflight finds reaches those who start a cluster, look at it and report it.

use serde_json::Value;

use crate::browser::Browser;
use crate::dashboard::{EIGHT, Served, down};
use crate::gpus::Machine;
use crate::sandbox::Sandbox;

/// What the report of a cluster says of preflight.
fn reported(sandbox: &Sandbox, name: &str) -> Value {
    let said = sandbox.run(&["report", name, "--file", "-"]);
    assert_eq!(said.code, 0, "{said}");
    let document: Value = serde_json::from_str(&said.stdout).expect("JSON");
    document["preflight"].clone()
}

#[test]
fn a_gpu_that_is_not_well_is_told_at_the_start_in_the_report_and_on_the_page() {
    let Some(machine) = Machine::new("preflight", "") else { return };
    let machine = machine.with_health(1, serde_json::json!({ "ecc_uncorrected": 3 }));
    let up = machine.up(&["--n-workers", "2", "--enable-nvlink"], &[]);
    assert_eq!(up.code, 0, "{up}");
    assert!(up.stderr.contains("preflight: ecc-errors: GPU1: 3 errors"), "{up}");

    let found = reported(&machine.sandbox, "dev");
    let found = found.as_array().expect("findings").iter();
    let bad: Vec<&Value> = found.filter(|one| one["severity"] == "warning").collect();
    let errors = bad.iter().find(|one| one["id"] == "ecc-errors").expect("it is there");
    assert_eq!(errors["about"], "GPU1", "{errors:#}");

    let Some(browser) = Browser::start() else { return };
    let served = Served::start(&machine.sandbox);
    browser.look_like(1440, "light");
    browser.open(&served.link);
    browser.wait_for("!document.querySelector('#preflight').hidden");
    let card = "document.querySelector('#findings [data-check=ecc-errors]')";
    browser.wait_for(&format!("{card}.textContent.includes('GPU1: 3 errors')"));
    browser.wait_for(&format!("{card}.querySelector('.pill').textContent === 'warning'"));
    browser.wait_for("document.querySelector('#preflight-facts').textContent.includes('warning')");
    browser.click("#findings [data-check=ecc-errors] summary");
    browser.picture("preflight-1440-light");
    browser.click("#machine [data-worker='gpu1']");
    browser.wait_for("document.querySelector('#details-title').textContent === 'gpu1'");
    assert_eq!(browser.errors(), Vec::<String>::new());
    served.end();
    machine.down(2);
}

#[test]
fn a_simulated_cluster_has_no_preflight() {
    let Some(browser) = Browser::start() else { return };
    let sandbox = Sandbox::new();
    let up = sandbox.run(&[&EIGHT[..], &["--name", "made-up", "--detach"]].concat());
    assert_eq!(up.code, 0, "{up}");
    assert_eq!(reported(&sandbox, "made-up"), Value::Null);
    let served = Served::start(&sandbox);
    browser.open(&served.link);
    browser.wait_for("document.querySelectorAll('#machine .worker.good').length === 8");
    assert_eq!(browser.script("return document.querySelector('#preflight').hidden"), true);
    served.end();
    down(&sandbox, "made-up");
}
