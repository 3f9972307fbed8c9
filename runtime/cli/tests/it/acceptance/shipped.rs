//! The shipped plugins on the shipped inputs, by the commands that `cargo xtask run` prints.
//!
//! Plugins come from `plugins/*.wasm`, which `cargo xtask plugins` builds. One that is not there, because a machine
//! lacks its language's tool, is left out, and the test says so where nothing hides it.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use serde_json::Value;
use sha2::Digest as _;
use warp_domain::ending::State;

use super::{Host, Scene, digest_of, target};

/// One shipped plugin and what is tried with it.
struct Shipped {
    plugin: &'static str,
    contract: &'static str,
    enqueue: &'static [&'static str],
    /// What `jobs show` says about its policy, before the source.
    policy: &'static [&'static str],
    /// Whether the result is right.
    judge: fn(&Scene, &Value),
}

const SHIPPED: &[Shipped] = &[
    Shipped {
        plugin: "thumbnail",
        contract: "make-thumbnail",
        enqueue: &["--payload", r#"{"source":"photo.png","target":"photo-small.jpeg","width":160,"height":120,"format":"jpeg"}"#],
        policy: &["semaphore on `cpu`, limit 2, wait", "30s"],
        judge: is_a_small_jpeg,
    },
    Shipped {
        plugin: "invoice",
        contract: "render-invoice",
        enqueue: &["--payload-file", "invoice.json"],
        policy: &["mutex on `invoice:{customer_id}`, limit 1, wait", "10s"],
        judge: is_the_invoice,
    },
    Shipped {
        plugin: "csv-report",
        contract: "profile-csv",
        enqueue: &["--payload", r#"{"file":"sales.csv"}"#],
        policy: &["semaphore on `cpu`, limit 2, wait", "5m"],
        judge: describes_the_sales,
    },
    Shipped {
        plugin: "checksum",
        contract: "sha256-file",
        enqueue: &["--payload", r#"{"file":"report.bin"}"#],
        policy: &["10m"],
        judge: is_the_checksum,
    },
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

on_each_scene! {
    the_shipped_plugins_do_their_work_on_the_shipped_inputs
}

on_session_locks! {
    the_shipped_plugins_do_their_work_on_the_shipped_inputs
}

/// Puts settings and inputs there as shipped, with plugins and cache where this test has them.
fn ship(scene: &Scene) {
    let inputs = root().join("examples/inputs");
    let settings = std::fs::read_to_string(inputs.join("warp.toml")).expect("the settings are shipped");
    let cache = target().join("test-cache");
    let here = settings.replace("\"../../plugins\"", "\"plugins\"").replace("\"../../target/warp-cache\"", &format!("{cache:?}"));
    assert!(!here.contains("\"../"), "a setting leads out of the test's directory: {here}");
    scene.ground.write("warp.toml", here);
    for file in ["invoice.json", "in/photo.png", "in/report.bin", "in/sales.csv"] {
        scene.ground.write(file, std::fs::read(inputs.join(file)).expect("the input is shipped"));
    }
}

fn the_shipped_plugins_do_their_work_on_the_shipped_inputs(scene: &Scene) {
    ship(scene);
    let (built, left_out): (Vec<_>, Vec<_>) =
        SHIPPED.iter().partition(|shipped| root().join("plugins").join(format!("{}.wasm", shipped.plugin)).exists());
    for Shipped { plugin, .. } in left_out {
        // Not `eprintln!`, which the runner keeps to itself when the test passes.
        let _ = writeln!(
            std::io::stderr(),
            "LEFT OUT of the acceptance test: plugin {plugin}, because plugins/{plugin}.wasm is not built (`cargo xtask plugins {plugin}` says why)"
        );
    }
    let Some(first) = built.first() else { return };
    for Shipped { plugin, .. } in &built {
        let file = format!("{plugin}.wasm");
        std::fs::copy(root().join("plugins").join(&file), scene.ground.path("plugins").join(&file)).expect("a copy");
    }
    let host = Host::start(scene, &[], &format!("{}.wasm", first.plugin));
    // Enqueued before the others have loaded: jobs wait for their plugin.
    let ids: Vec<String> = built
        .iter()
        .map(|shipped| scene.ground.run(&[&["enqueue", shipped.contract], shipped.enqueue].concat()).good().trim().to_owned())
        .collect();
    for (Shipped { plugin, contract, policy, judge, .. }, id) in built.iter().zip(&ids) {
        let job = scene.until_job(id, plugin, |job| job.summary.state.is_final());
        assert_eq!((job.summary.state, job.summary.attempts), (State::Completed, 1), "{job:?}");
        let result = job.result.as_deref().expect("every shipped plugin has a result");
        judge(scene, &serde_json::from_str(result).expect("JSON"));

        // Its page has the rules with where they come from, and the version that ran it.
        let digest = digest_of(&scene.ground.path("plugins").join(format!("{plugin}.wasm")));
        let page = scene.ground.run(&["jobs", "show", id]).good();
        let short = digest.short();
        let source = format!("   from handler {contract}@{short}");
        for rule in *policy {
            assert!(page.lines().any(|line| line.contains(rule) && line.ends_with(&source)), "no `{rule}{source}` in\n{page}");
        }
        let plugin = page.lines().find_map(|line| line.trim_start().strip_prefix("plugin "));
        assert_eq!(plugin.map(str::trim), Some(digest.to_string().as_str()), "{page}");
        assert!(page.lines().any(|line| line.contains("  Completed  ") && line.contains(&format!("plugin {short}"))), "{short}?\n{page}");
    }
    host.stop();
}

fn is_the_checksum(scene: &Scene, result: &Value) {
    let bytes = std::fs::read(scene.ground.path("in/report.bin")).expect("the input");
    let sum: String = sha2::Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(*result, serde_json::json!({ "file": "report.bin", "bytes": bytes.len(), "sha256": sum }));
}

fn is_the_invoice(_: &Scene, result: &Value) {
    // Net 64.80 at 19 % and 13.35 at 7 %, each tax rounded once: 64.80 + 12.31 + 13.35 + 0.93.
    assert_eq!((&result["number"], &result["currency"], &result["total"]), (&"2030-0117".into(), &"EUR".into(), &"91.39".into()));
    let html = result["html"].as_str().expect("a page");
    assert!(html.contains("Kettle &lt;1.7 l&gt;") && html.contains("Brown &amp; Daughters") && !html.contains("<1.7"), "{html}");
}

fn describes_the_sales(scene: &Scene, result: &Value) {
    let text = scene.ground.read("in/sales.csv");
    // From the right, because an item may contain a comma: customer, paid, unit price, quantity.
    let rows: Vec<Vec<&str>> = text.lines().skip(1).map(|line| line.rsplitn(5, ',').collect()).collect();
    assert_eq!((&result["rows"], &result["bytes"]), (&rows.len().into(), &text.len().into()));
    let column = |name: &str| result["columns"].as_array().and_then(|all| all.iter().find(|of| of["name"] == name)).expect("a column");
    for (name, at) in [("quantity", 3), ("unit_price", 2)] {
        let values: Vec<f64> = rows.iter().filter_map(|row| row[at].parse().ok()).collect();
        let (low, high) = values.iter().fold((f64::MAX, f64::MIN), |(low, high), value| (value.min(low), value.max(high)));
        let expected = [low, high, values.iter().sum::<f64>() / values.len() as f64];
        for (what, expected) in ["min", "max", "mean"].into_iter().zip(expected) {
            let found = column(name)[what].as_f64().expect("a number");
            assert!((found - expected).abs() < 1e-9, "{what} of {name}: {found}, not {expected}");
        }
        assert_eq!(column(name)["missing"], rows.len() - values.len());
    }
    assert_eq!(column("customer")["missing"], rows.iter().filter(|row| row[0].is_empty() || row[0] == "NA").count());
    assert_eq!(column("day")["min"], "2030-01-01");
}

fn is_a_small_jpeg(scene: &Scene, result: &Value) {
    let bytes = std::fs::read(scene.ground.path("out/photo-small.jpeg")).expect("it was written");
    // 480 × 320 fitted into 160 × 120.
    let expected = serde_json::json!({ "target": "photo-small.jpeg", "width": 160, "height": 107, "bytes": bytes.len() });
    assert_eq!(*result, expected);
    assert_eq!(jpeg_size(&bytes), Some((160, 107)));
}

/// Width and height by the frame header of a JPEG file.
fn jpeg_size(bytes: &[u8]) -> Option<(u16, u16)> {
    let mut rest = bytes.strip_prefix(&[0xff, 0xd8])?;
    loop {
        let [0xff, marker, high, low, ..] = *rest else { return None };
        let length = usize::from(u16::from_be_bytes([high, low]));
        // Baseline or progressive frame: length, precision, height, width.
        if matches!(marker, 0xc0 | 0xc2) {
            let size = rest.get(5..9)?;
            return Some((u16::from_be_bytes([size[2], size[3]]), u16::from_be_bytes([size[0], size[1]])));
        }
        rest = rest.get(2 + length..)?;
    }
}
