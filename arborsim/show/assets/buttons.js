// Buttons of which one is pressed; tells `show` the chosen item, which has a `title`.
function buttons(box, items, show) {
  const before = box.querySelector("[aria-pressed=true]")?.textContent;
  const press = (item) => {
    for (const one of box.children) one.setAttribute("aria-pressed", one.textContent === item.title);
    show(item);
  };
  box.replaceChildren(
    ...items.map((item) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = item.title;
      button.addEventListener("click", () => press(item));
      return button;
    }),
  );
  if (items.length) press(items.find((item) => item.title === before) ?? items[0]);
}
