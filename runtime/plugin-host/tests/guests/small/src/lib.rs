//! A component that compiles fast, for tests that need many versions of one.

use warp::job::cancellation;

wit_bindgen::generate!({ path: "../../../../../wit/warp-job@1.0.0", world: "handler" });

struct Small;
export!(Small);

impl Guest for Small {
    fn handle(attempt: Attempt) -> Result<Option<String>, Failure> {
        if attempt.payload == "wait" {
            while !cancellation::cancelled() {}
        }
        Ok(Some(attempt.payload))
    }
}
