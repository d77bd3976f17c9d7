// Runs before the page is drawn, so that a stored theme does not flash; hence a classic script, not a module.
(() => {
  const KEY = "slipstream.theme";
  const root = document.documentElement;
  const system = window.matchMedia("(prefers-color-scheme: dark)");

  /** @returns {"light" | "dark" | null} */
  const stored = () => {
    try {
      const value = localStorage.getItem(KEY);
      return value === "light" || value === "dark" ? value : null;
    } catch {
      return null;
    }
  };

  const current = () => root.dataset.theme ?? (system.matches ? "dark" : "light");

  const choice = stored();
  if (choice) root.dataset.theme = choice;

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const show = () => {
      const dark = current() === "dark";
      button.setAttribute("aria-pressed", String(dark));
      button.querySelector("use").setAttribute("href", dark ? "#i-sun" : "#i-moon");
    };
    button.addEventListener("click", () => {
      root.dataset.theme = current() === "dark" ? "light" : "dark";
      try {
        localStorage.setItem(KEY, root.dataset.theme);
      } catch {
        // Without storage the choice lasts until the page is left.
      }
      show();
    });
    system.addEventListener("change", show);
    show();
  });
})();
