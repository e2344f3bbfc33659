//! The commands of the documents: their options exist, and what is shown of their output is what they
//! print.

use std::path::Path;
use std::time::Duration;

use crate::sandbox::{Said, Sandbox, eventually};

/// Commands of a document's blocks, with the lines that are shown of what they print.
fn commands(document: &str) -> Vec<(Vec<String>, Vec<String>)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(document);
    let text = std::fs::read_to_string(&path).expect(document);
    let mut commands: Vec<(Vec<String>, Vec<String>)> = Vec::new();
    let mut shows = false;
    for line in text.lines() {
        let line = line.strip_prefix("    ").unwrap_or("");
        let typed = line.strip_prefix("$ ").unwrap_or(line);
        let typed = typed.strip_prefix("target/release/").unwrap_or(typed);
        if let Some(arguments) = typed.strip_prefix("cuda-cluster ") {
            let (arguments, _) = arguments.split_once(" #").unwrap_or((arguments, ""));
            let arguments = arguments.split_whitespace().map(str::to_owned).collect();
            commands.push((arguments, Vec::new()));
            shows = line.starts_with("$ ");
        } else if line.is_empty() || line.starts_with('…') {
            shows &= !line.starts_with('…');
        } else if let (true, Some((_, shown))) = (shows, commands.last_mut()) {
            shown.push(line.to_owned());
        }
    }
    commands
}

#[test]
fn every_option_of_the_documents_commands_is_one() {
    let sandbox = Sandbox::new();
    let mut tried = 0;
    for document in ["README.md", "configs/from-dask-cuda.md", "configs/several-machines.md"] {
        for (mut arguments, _) in commands(document) {
            // What follows is another program's.
            let own = arguments.iter().position(|word| word == "--").unwrap_or(arguments.len());
            arguments.truncate(own);
            arguments.push("--help".to_owned());
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            let said = sandbox.run(&arguments);
            assert_eq!(said.code, 0, "{document}: {arguments:?}: {said}");
            tried += 1;
        }
    }
    assert!(tried > 20, "{tried} commands");
}

#[test]
fn what_the_readme_shows_of_a_command_is_what_it_prints() {
    let sandbox = Sandbox::new();
    let shown = commands("README.md").into_iter().filter(|(_, shown)| !shown.is_empty());
    let shown: Vec<_> = shown.collect();
    assert_eq!(shown.len(), 1, "{shown:?}");
    for (arguments, shown) in shown {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let said = sandbox.run(&arguments);
        let printed: Vec<&str> = said.stdout.lines().filter(|line| !line.is_empty()).collect();
        assert_eq!(said.code, 0, "{said}");
        assert_eq!(printed[..shown.len()], shown, "{arguments:?}");
    }
    let mut plans = commands("README.md").into_iter().map(|(arguments, _)| arguments);
    let explained = plans.find(|words| words.iter().any(|word| word == "--explain"));
    let explained = explained.expect("an example of reasons");
    let explained: Vec<&str> = explained.iter().map(String::as_str).collect();
    let said = sandbox.run(&explained);
    for words in ["CPUs near GPU 3", "mlx5_1:1  PIX, the nearest", "not mlx5_0:1: PHB, farther"] {
        assert!(said.code == 0 && said.stdout.contains(words), "{words}: {said}");
    }
}

#[test]
fn the_picture_of_the_readme_is_what_the_program_draws() {
    let draw = ["topo", "--topology", "dgx-h100", "-o", "svg"];
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let readme = std::fs::read_to_string(root.join("README.md")).expect("README.md");
    let shown = format!("`cuda-cluster {}` draws it](topologies/dgx-h100.svg)", draw.join(" "));
    assert!(readme.contains(&shown), "{shown}");
    let picture = std::fs::read_to_string(root.join("topologies/dgx-h100.svg")).expect("a picture");
    let said = Sandbox::new().run(&draw);
    assert!(said.stdout == picture, "topologies/dgx-h100.svg: draw it again as the README says");
}

#[test]
fn whatever_the_readme_says_prints_json_says_its_version() {
    let sandbox = Sandbox::new();
    let readme = Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md");
    let readme = std::fs::read_to_string(readme).expect("README.md");
    // Wherever its lines end.
    let has = ["have", "`-o", "json`", "with", "a", "`version`"];
    let paragraphs = readme.split("\n\n").map(|text| text.split_whitespace().collect::<Vec<_>>());
    let said = paragraphs.filter_map(|words| {
        let at = words.windows(has.len()).position(|some| some == has)?;
        Some(words[..at].join(" "))
    });
    let said = said.last().expect("the sentence");
    let machine = ["--topology", "dgx-h100", "--simulate", "--n-workers", "2"];
    let up = [&["up", "--name", "told", "--detach"][..], &machine].concat();
    let version = |name: &str| if ["plan", "doctor"].contains(&name) { 2 } else { 1 };
    // Each as it is asked, after `up`.
    let commands = [
        ("up", up),
        ("topo", vec!["topo", "--topology", "dgx-h100"]),
        ("plan", vec!["plan", "--topology", "dgx-h100"]),
        ("ps", vec!["ps", "told"]),
        ("env", vec!["env", "told"]),
        ("verify", vec!["verify", "told", "--rounds", "1"]),
        ("bench", vec!["bench", "merge", "told", "--runs", "1", "--parts", "2", "--rows", "9"]),
        ("explain", vec!["explain", "1:1", "told"]),
        ("history", vec!["history", "told"]),
        ("why", vec!["why", "told"]),
        ("doctor", vec!["doctor"]),
    ];
    assert_eq!(said.matches('`').count(), 2 * commands.len(), "{said}");
    for (name, mut arguments) in commands {
        assert!(said.contains(&format!("`{name}`")), "{name}: {said}");
        arguments.extend(["-o", "json"]);
        let mut told = sandbox.run(&arguments);
        // The first figures come after ten seconds.
        let begins = |told: &Said| told.code != 0 && told.stderr.contains("begins ten seconds");
        if name == "history" && begins(&told) {
            eventually("a history", Duration::from_secs(60), || {
                told = sandbox.run(&arguments);
                !begins(&told)
            });
        }
        let json: serde_json::Value =
            serde_json::from_str(&told.stdout).unwrap_or_else(|_| panic!("{arguments:?}: {told}"));
        assert_eq!(json["version"], version(name), "{arguments:?}");
    }
    let events = sandbox.run(&["events", "told", "--json"]);
    assert!(events.stdout.lines().count() > 5, "{events}");
    for line in events.stdout.lines() {
        assert!(serde_json::from_str::<serde_json::Value>(line).is_ok(), "{line}");
    }
    assert_eq!(sandbox.run(&["down", "told"]).code, 0);
    sandbox.assert_nothing_is_left();
}
