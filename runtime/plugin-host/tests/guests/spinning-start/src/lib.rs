//! A component whose start code never ends: it spins before anybody has called its handler.

wit_bindgen::generate!({ path: "../../../../../wit/warp-job@1.0.0", world: "handler" });

struct Never;
export!(Never);

impl Guest for Never {
    fn handle(_: Attempt) -> Result<Option<String>, Failure> {
        Ok(None)
    }
}

/// Constructors run when the component is instantiated.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = spin;

extern "C" fn spin() {
    let mut turns = 0u64;
    loop {
        turns = std::hint::black_box(turns.wrapping_add(1));
    }
}
