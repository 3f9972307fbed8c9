//! The smallest handler there is. `warp-host bench` runs it to measure what a component costs.

wit_bindgen::generate!({ path: "../../wit/warp-job@1.0.0", world: "handler" });

struct Noop;
export!(Noop);

impl Guest for Noop {
    fn handle(_: Attempt) -> Result<Option<String>, Failure> {
        Ok(None)
    }
}
