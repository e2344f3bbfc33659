//! All clusters on the page, and who holds this machine's GPUs.

use std::process::{Child, Command};

use cuda_cluster::topology;

use super::browser::Browser;
use super::dashboard::{EIGHT, Served, down};
use super::fake_machine::FakeMachine;
use super::sandbox::Sandbox;

/// A process that is of no cluster.
struct Stranger(Child);

impl Drop for Stranger {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn all_clusters_and_who_holds_the_gpus_are_shown_first_each_with_its_own_address() {
    let Some(browser) = Browser::start() else { return };
    let sandbox = Sandbox::new();
    let stranger = Stranger(Command::new("sleep").arg("1000").spawn().expect("a process"));
    let folder = tempfile::tempdir().expect("a directory");
    let machine = topology::parse(topology::builtin("rtx-4090-2").expect("built in"));
    let fake = FakeMachine::write(&machine.expect("a machine"), folder.path()).expect("written");
    // Somebody computes on the second GPU.
    let path = folder.path().join("nvml.json");
    let text = std::fs::read_to_string(&path).expect("a description");
    let mut described: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    described["gpus"][1]["processes"] = serde_json::json!([stranger.0.id()]);
    std::fs::write(&path, described.to_string()).expect("written");

    let spec = folder.path().join("spec.yaml");
    let text = "version: 1\nname: real\nengine: command\ngpus: [0]\ndisplay_gpus: use\n\
                command: {argv: [sleep, '1000']}\n";
    std::fs::write(&spec, text).expect("written");
    let mut real = fake.command();
    real.args(["up", "--detach", "-f"]).arg(&spec);
    let up = sandbox.spawn_program(real).wait();
    assert_eq!(up.code, 0, "{up}");
    let asked = ["--n-workers", "2", "--name", "made-up", "--detach"];
    let up = sandbox.run(&[&EIGHT[..], &asked].concat());
    assert_eq!(up.code, 0, "{up}");
    let over = ["run", "--gpus", "none", "--cpu-workers", "1", "--name", "over", "--"];
    let over = sandbox.run(&[&over[..], &["sh", "-c", "exit 3"]].concat());
    assert_ne!(over.code, 0, "{over}");

    let mut dashboard = fake.command();
    dashboard.args(["dashboard", "--no-browser"]);
    let served = Served::of(sandbox.spawn_program(dashboard));
    browser.look_like(1440, "light");
    browser.open(&served.link);
    let rows = |part: &str| {
        format!("[...document.querySelectorAll('#overview [data-part={part}] tbody tr')]")
    };
    browser.wait_for(&format!("{}.length === 3", rows("clusters")));
    let row = |part: &str, at: usize, pattern: &str| {
        browser.wait_for(&format!(
            "/{pattern}/.test({}[{at}]?.innerText.replace(/\\s+/g, ' '))",
            rows(part)
        ));
    };
    row("clusters", 0, "^made-up ● READY native, simulated .* for \\d+ (s|min) 2 of 2 2 ");
    row("clusters", 1, "^real ● READY command .* 1 of 1 1 ");
    row("clusters", 2, "^over ✕ failed command ended .* cpu0 ended with status 3");
    row("gpus", 0, "^GPU0 real\\/gpu0 ");
    row("gpus", 1, "^GPU1 process \\d+ sleep of \\w+ with 1.0 GiB ");
    browser.wait_for("document.querySelector('#machine-card').offsetParent === null");
    // Who sees all of it asks for all of it, and for nothing beside.
    browser.script(
        "window.asked = []; const real = fetch; \
         window.fetch = (what, ...more) => { asked.push(what); return real(what, ...more); }",
    );
    browser.wait_for("asked.length >= 3");
    assert_eq!(browser.script("return [...new Set(asked)]"), serde_json::json!(["api/overview"]));
    for (width, scheme) in [(1440, "light"), (1440, "dark"), (390, "light"), (390, "dark")] {
        browser.look_like(width, scheme);
        browser.picture(&format!("overview-{width}-{scheme}"));
        browser.assert_it_fits(&format!("at {width}"));
    }
    browser.look_like(1440, "light");

    // Each has an address, which opens it alone.
    let link = "document.querySelector('#overview [data-part=gpus] a')";
    let address = browser.script(&format!("return {link}.href"));
    let address = address.as_str().expect("an address").to_owned();
    assert!(address.ends_with("/#cluster=real&worker=gpu0"), "{address}");
    browser.script(&format!("{link}.click()"));
    let details = "document.querySelector('#details-title')?.textContent === 'gpu0'";
    browser.wait_for(details);
    browser.wait_for("document.querySelector('#name').textContent === 'real'");
    browser.script("asked.length = 0");
    browser.wait_for("asked.includes('api/clusters')");
    assert_eq!(browser.script("return asked.includes('api/overview')"), false);
    browser.open("about:blank");
    browser.open(&address);
    browser.wait_for(details);

    // And back; what is new is there by itself.
    browser.click("#all");
    browser.wait_for("location.hash === '#view=all'");
    browser.wait_for(&format!("{}.length === 3", rows("clusters")));
    down(&sandbox, "made-up");
    browser.wait_for(&format!("{}.length === 2", rows("clusters")));
    assert_eq!(browser.errors(), [""; 0]);

    let asked = served.ask("GET /api/overview", &[]);
    assert_eq!(asked.status, 401, "who has no token learns nothing: {asked:?}");
    assert!(!asked.body.contains("real"), "{asked:?}");
    served.end();
    down(&sandbox, "real");
    drop(stranger);
    sandbox.assert_only_the_causes_are_left("over");
}
